"""Tool declarations that vary: verb x noun names in several spellings, parameters, and the words users ask with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from scripts.nano.document import Tool
from scripts.nano.lexicon import Sampler


@dataclass(frozen=True)
class Concept:
    """One kind of parameter: the names it goes by, its JSON type, and phrases that carry its value ({v})."""

    names: tuple[str, ...]
    type: str
    phrases: tuple[str, ...]
    about: str
    options: tuple[str, ...] = ()


CONCEPTS: dict[str, Concept] = {
    "city": Concept(("city", "city", "location", "place", "town"), "string",
                    ("in {v}", "for {v}", "in {v}"), "City name"),
    "email": Concept(("email", "to", "recipient", "address"), "string", ("to {v}", "for {v}"), "E-mail address"),
    "path": Concept(("path", "path", "file", "file_path", "filename"), "string",
                    ("at {v}", "from {v}", "{v}"), "File path"),
    "url": Concept(("url", "url", "link", "page_url"), "string", ("at {v}", "from {v}", "{v}"), "Web address"),
    "query": Concept(("query", "query", "q", "text", "term", "topic"), "string",
                     ("for {v}", "about {v}", 'for "{v}"'), "What to look for"),
    "title": Concept(("title", "name", "label", "subject"), "string",
                     ("called {v}", "named {v}", "titled {v}", 'called "{v}"'), "Title"),
    "person": Concept(("name", "user", "person", "customer", "owner"), "string", ("for {v}", "of {v}"), "Who"),
    "id": Concept(("id", "id", "number", "item_id", "ref"), "integer", ("with id {v}", "number {v}", "{v}"), "Number"),
    "code": Concept(("code", "sku", "symbol", "key", "token"), "string", ("with code {v}", "{v}", "of {v}"), "Code"),
    "date": Concept(("date", "date", "day", "when"), "string", ("on {v}", "for {v}"), "Date"),
    "time": Concept(("time", "start", "hour"), "string", ("at {v}",), "Time of day"),
    "count": Concept(("count", "limit", "max_results", "n", "days", "size"), "integer", ("with {p} {v}",), "How many"),
    "amount": Concept(("amount", "price", "value", "total"), "number", ("with {p} {v}",), "Amount"),
    "flag": Concept(("verbose", "urgent", "dry_run", "recursive", "private", "unread"), "boolean", ("with {p} {v}",),
                    "Yes or no"),
    "unit": Concept(("unit", "units"), "string", ("in {v}",), "Unit", ("celsius", "fahrenheit", "metric", "imperial")),
    "language": Concept(("language", "lang"), "string", ("in {v}",), "Language",
                        ("English", "German", "French", "Spanish", "Italian", "Japanese")),
    "color": Concept(("color",), "string", ("in {v}",), "Color", ("red", "green", "blue", "white", "yellow", "black")),
    "message": Concept(("message", "body", "content", "text"), "string", ("saying {v}", 'with {p} "{v}"'), "Text"),
    "expression": Concept(("expression", "expression", "expr", "formula"), "string", ("{v}",), "What to work out"),
}  # fmt: skip

# nouns, main concepts, second concepts
GROUPS: tuple[tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]], ...] = (
    (("weather", "weather", "forecast", "temperature", "humidity", "wind", "traffic", "sunrise", "timezone", "map",
      "population"), ("city",), ("date", "unit", "language", "count")),
    (("file", "file", "document", "log", "folder", "image", "config", "script", "report", "backup", "archive"),
     ("path",), ("count", "flag", "message")),
    (("note", "task", "ticket", "order", "invoice", "issue", "reminder", "booking", "record", "item", "job"),
     ("id", "title", "code"), ("flag", "date", "message", "person")),
    (("email", "message", "letter", "invite", "alert", "reply"), ("email", "person"), ("message", "title", "flag")),
    (("page", "site", "link", "feed", "video", "article"), ("url",), ("count", "language")),
    (("web", "books", "songs", "movies", "recipes", "products", "papers", "photos", "hotels", "flights", "news"),
     ("query", "query", "city"), ("count", "amount", "language")),
    (("meeting", "event", "calendar", "schedule", "shift", "appointment"), ("date", "title"), ("time", "person")),
    (("price", "stock", "rate", "balance", "budget", "payment"), ("code", "person"), ("amount", "date")),
    (("user", "customer", "member", "profile", "contact", "account"), ("person", "id", "email"), ("flag", "city")),
    (("light", "door", "lamp", "heater", "fan", "alarm", "timer", "volume"), ("title", "id"),
     ("count", "color", "flag")),
)  # fmt: skip
READ_VERBS = ("get", "get", "get", "fetch", "read", "find", "check", "show", "list", "load", "query", "search")
ACT_VERBS = (
    "create", "add", "delete", "remove", "update", "send", "open", "close", "start", "stop", "save", "set", "share",
    "copy", "move", "print", "book", "cancel", "export", "import", "sync", "sort", "scan", "translate",
)  # fmt: skip
NATURAL = {  # groups where an action verb reads oddly most of the time
    "weather", "forecast", "temperature", "humidity", "wind", "traffic", "sunrise", "timezone", "population",
}  # fmt: skip
WEATHER_ASKS = ("How is the {n} in {v}", "What is the {n} like in {v}", "What's the {n} like in {v}", "{n} in {v}",
                "I want to know the {n} in {v}")  # fmt: skip
PLAIN_ASKS: dict[str, tuple[str, ...]] = {  # ways to ask by main parameter that need not name verb or noun
    "city weather": WEATHER_ASKS, "city forecast": WEATHER_ASKS, "city temperature": WEATHER_ASKS,
    "city traffic": WEATHER_ASKS, "city wind": WEATHER_ASKS,
    "path": ("Read {v}", "What is in {v}", "Show me {v}", "What does {v} say", "Read the {n} {v}"),
    "query": ("Search for {v}", "Look up {v}", "Find {v}", "Search the {n} for {v}"),
    "url": ("Read {v}", "What is on {v}", "Open {v}"),
}  # fmt: skip
CALC_NAMES = ("calculator", "calculate", "calc", "evaluate", "eval_math", "compute", "solve_math", "do_math")
ASKS = ("", "", "", "", "Please ", "Please ", "Can you ", "Could you ", "I need you to ", "Now ")


@dataclass(frozen=True)
class Slot:
    """A parameter of one declared tool."""

    name: str
    concept: str
    required: bool

    @property
    def type(self) -> str:
        return CONCEPTS[self.concept].type


@dataclass(frozen=True)
class ToolSpec:
    """A declared tool: verb and noun as users say them, its spelled name and its parameters."""

    verb: str
    noun: str
    name: str
    slots: tuple[Slot, ...]


def make_spec(s: Sampler, *, fixed_pair: bool = False, avoid: frozenset[str] = frozenset()) -> ToolSpec:
    """A random tool whose noun is not in `avoid`; with fixed_pair the verb-noun pair obeys the held-out rule."""
    while True:
        if s.chance(0.05) and "math" not in avoid:
            slot = Slot(s.pick(CONCEPTS["expression"].names), "expression", True)
            return ToolSpec("calculate", "math", s.pick(CALC_NAMES), (slot,))
        group = GROUPS[s.between(0, len(GROUPS) - 1)]
        verb, noun = _pair(s, group[0], fixed_pair)
        if noun not in avoid:
            break
    main = s.pick(group[1]) if s.chance(0.8) else s.pick(list(CONCEPTS))
    slots = [_slot(s, main, True)]
    if s.chance(0.45):
        second = s.pick(group[2]) if s.chance(0.8) else s.pick(list(CONCEPTS))
        other = _slot(s, second, s.chance(0.7))
        if other.concept != main and other.name != slots[0].name and _distinct_phrases(main, second):
            slots.append(other)
    return ToolSpec(verb, noun, _spell(s, verb, noun, slots[0].name), tuple(slots))


def _pair(s: Sampler, nouns: tuple[str, ...], fixed_pair: bool) -> tuple[str, str]:
    def draw() -> str:
        noun = s.pick(nouns)
        read = s.chance(0.9 if noun in NATURAL else 0.5)
        return f"{s.pick(READ_VERBS if read else ACT_VERBS)} {noun}"

    pair = s.split_draw("pair", draw) if fixed_pair or s.split == "train" else draw()
    verb, noun = pair.split()
    return verb, noun


def _slot(s: Sampler, concept: str, required: bool) -> Slot:
    return Slot(s.pick(CONCEPTS[concept].names), concept, required)


def _distinct_phrases(first: str, second: str) -> bool:
    """Two strings said the same way ("in Paris in German") would be ambiguous only when both are names."""
    return {first, second} not in ({"city", "person"}, {"email", "person"}, {"query", "title"}, {"message", "query"})


def _spell(s: Sampler, verb: str, noun: str, param: str) -> str:
    how = s.rng.random()
    if how < 0.6:
        return f"{verb}_{noun}"
    if how < 0.75:
        return verb + noun.capitalize()
    if how < 0.83:
        return f"{noun}_{verb}"
    if how < 0.9:
        return f"{verb}-{noun}"
    if how < 0.95:
        return f"{verb}_{noun}_{s.pick(('data', 'info', 'v2', 'now', 'by_' + param))}"
    return f"{verb}_the_{noun}"


def schema_of(s: Sampler, spec: ToolSpec) -> Tool:
    """The declaration as a client sends it; how much of it is filled in varies."""
    described = s.chance(0.15)
    properties: dict[str, Any] = {}
    for slot in spec.slots:
        concept = CONCEPTS[slot.concept]
        entry: dict[str, Any] = {"type": slot.type}
        if concept.options and s.chance(0.4):
            entry["enum"] = list(concept.options)
        if described:
            entry["description"] = concept.about
        properties[slot.name] = entry
    parameters: dict[str, Any] = {"type": "object", "properties": properties}
    if s.chance(0.6) or not all(slot.required for slot in spec.slots):
        parameters["required"] = [slot.name for slot in spec.slots if slot.required]
    if s.chance(0.03):
        parameters["additionalProperties"] = False
    function: dict[str, Any] = {"name": spec.name}
    if s.chance(0.5):
        form = s.pick(("{v} the {n}", "{v} {n}", "{v} the {n}.", "{v} the current {n} for a given {p}"))
        function["description"] = form.format(v=spec.verb.capitalize(), n=spec.noun, p=spec.slots[0].name)
    function["parameters"] = parameters
    return {"type": "function", "function": function}


def value_for(s: Sampler, slot: Slot) -> Any:
    """A fresh value of the right type for this parameter."""
    concept = CONCEPTS[slot.concept]
    if concept.options:
        return s.pick(concept.options)
    if slot.concept == "id":
        return int(s.digits(1, 6))
    if slot.concept == "count":
        return s.between(1, 99) if s.chance(0.8) else int(s.digits(3, 4))
    if slot.concept == "amount":
        return float(s.decimal()) if s.chance(0.6) else int(s.digits(1, 4))
    if slot.concept == "flag":
        return s.chance(0.5)
    draws = {
        "city": s.city, "email": s.email, "path": s.path, "url": s.url, "query": s.phrase, "title": s.title,
        "person": s.name, "code": s.ident, "date": s.date, "time": s.clock, "message": s.sentence,
        "expression": s.expression,
    }  # fmt: skip
    if slot.concept in ("query", "title") and s.chance(0.15):
        return s.anything()
    return draws[slot.concept]()


def shown(value: Any) -> str:
    """A value the way both users and the call form write it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)


def request_text(s: Sampler, spec: ToolSpec, values: dict[str, Any]) -> str:
    """What a user says to have this tool called with these values."""
    if spec.noun == "math":
        text = shown(next(iter(values.values())))
        return s.pick(
            (f"Calculate {text}", f"What is {text}?", f"Compute {text}.", f"Work out {text}.", f"{text} = ?",
             f"Use the calculator for {text}.", f"How much is {text}?")
        )  # fmt: skip
    if s.chance(0.06):
        listed = " and ".join(f"{name} {shown(v)}" for name, v in values.items())
        return s.pick(("Call ", "Use ")) + f"{spec.name} with {listed}" + s.pick((".", ""))
    tails = [_said(s, slot, shown(values[slot.name])) for slot in spec.slots if slot.name in values]
    tail = " ".join(reversed(tails) if s.chance(0.1) else tails)
    how = s.rng.random()
    readable = spec.verb in READ_VERBS
    noun = spec.noun
    if readable and how < 0.3:
        return s.pick(
            ("What is the ", "What is the ", "Show me the ", "Tell me the ", "What's the ", "Give me the ")
        ) + (f"{noun} {tail}" + s.pick(("?", "?", "", ".")))
    if how < 0.38 and not tail.startswith(shown(next(iter(values.values())))) and len(tails) == 1:
        return f"{tail[0].upper()}{tail[1:]}, {spec.verb} the {noun}."
    if readable and s.chance(0.2):
        plain = PLAIN_ASKS.get(spec.slots[0].concept if spec.slots[0].concept != "city" else f"city {noun}")
        if plain is not None:
            value = shown(values[spec.slots[0].name])
            return " ".join([s.pick(plain).format(v=value, n=noun), *tails[1:]]) + s.pick(("", "", "?", "."))
    article = s.pick(("the ", "the ", "the ", "", "a ", "my "))
    ask = s.pick(ASKS)
    verb = spec.verb if ask else spec.verb.capitalize()
    end = s.pick(("?", "? ", "")).strip() if ask.startswith(("Can", "Could")) else s.pick((".", ".", "", " please."))
    return f"{ask}{verb} {article}{noun} {tail}{end}"


def _said(s: Sampler, slot: Slot, value: str) -> str:
    label = slot.name.replace("_", " ") if s.chance(0.7) else slot.name
    if s.chance(0.25):
        return s.pick(("with {p} {v}", "{p} {v}", "{p}: {v}", "with {p} = {v}")).format(p=label, v=value)
    return s.pick(CONCEPTS[slot.concept].phrases).format(p=label, v=value)


def thought_for(name: str, arguments: dict[str, Any]) -> str:
    """The short thought before a call; it already copies the name and the values."""
    if not arguments:
        return f"Use {name}."
    return f"Use {name} with " + " and ".join(f"{key} {shown(value)}" for key, value in arguments.items()) + "."
