"""One subcommand of `agens` per file; cli.py maps flags to them."""
