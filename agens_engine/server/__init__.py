"""HTTP in, engine requests out: routes, API dialects, streaming, errors."""
