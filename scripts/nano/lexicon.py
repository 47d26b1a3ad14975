"""Words and values: everything the generators draw from, and the rule that holds some of it out.

A word, name, city, verb-noun pair or number pair whose hash falls in one of eight buckets is never used in the
"train" split; the "heldout" split uses only those where a document's answer depends on them. Open-vocabulary
values (made-up words, e-mails, paths, identifiers) are sampled from letters, syllables and tokenizer pieces alike,
so that every token of the small vocabulary is copied often.
"""

from __future__ import annotations

import json
import random
import zlib
from collections.abc import Callable
from functools import cache
from pathlib import Path

ASSET_DIR = Path(__file__).resolve().parents[2] / "agens_engine" / "assets" / "nano"
HELD_BUCKETS = 8


@cache
def is_held(category: str, key: str) -> bool:
    """Whether the key belongs to the held-out eighth of its category; a pure function of the two strings."""
    return zlib.crc32(f"nano/{category}/{key}".encode()) % HELD_BUCKETS == 3


class Sampler:
    """A seeded source of words and values for one split.

    split   "train" never yields a held-out key, "heldout" only yields those
    pieces  whether made-up words may be built from the shipped tokenizer's letter pieces (off while building it)
    """

    def __init__(self, seed: int, split: str, *, pieces: bool = True) -> None:
        if split not in ("train", "heldout"):
            raise ValueError(f"split must be train or heldout, not {split!r}")
        self.rng = random.Random(f"nano/{split}/{seed}")
        self.split = split
        self.held_wanted = split == "heldout"
        self._pieces = letter_pieces() if pieces else ()

    # choosing -------------------------------------------------------------------------------------------------
    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    def pick(self, options: tuple[str, ...] | list[str]) -> str:
        return options[int(self.rng.random() * len(options))]

    def pick_index(self, options: tuple[int, ...]) -> int:
        return options[int(self.rng.random() * len(options))]

    def between(self, low: int, high: int) -> int:
        return self.rng.randint(low, high)

    def split_draw(self, category: str, draw: Callable[[], str]) -> str:
        """Draw until the result is on this sampler's side of the held-out rule."""
        for _ in range(2000):
            key = draw()
            if is_held(category, key) == self.held_wanted:
                return key
        raise ValueError(f"no {self.split} value found for {category}")

    # words ----------------------------------------------------------------------------------------------------
    def word(self) -> str:
        """A made-up lower-case word."""
        return self.split_draw("word", self._any_word)

    def _any_word(self) -> str:
        how = self.rng.random()
        if how < 0.4 or (not self._pieces and how < 0.8):
            return "".join(self._syllable() for _ in range(self.between(2, 3)))
        if how < 0.85 and self._pieces:
            return "".join(self.pick(self._pieces) for _ in range(self.between(1, 3)))
        return "".join(self.pick(LETTERS) for _ in range(self.between(2, 6)))

    def _syllable(self) -> str:
        tail = self.pick(CODAS) if self.chance(0.35) else ""
        return self.pick(ONSETS) + self.pick(VOWELS) + tail

    def name(self) -> str:
        return self.split_draw("name", lambda: self.pick(NAMES) if self.chance(0.4) else self._any_word().capitalize())

    def city(self) -> str:
        return self.split_draw("city", lambda: self.pick(CITIES) if self.chance(0.5) else self._any_word().capitalize())

    def common(self) -> str:
        return self.pick(COMMON)

    def phrase(self) -> str:
        """Two to four words, common or made up."""
        return " ".join(self.common() if self.chance(0.6) else self.word() for _ in range(self.between(2, 4)))

    def title(self) -> str:
        how = self.rng.random()
        if how < 0.3:
            return self.word()
        return self.phrase().title() if how < 0.5 else self.phrase()

    def sentence(self) -> str:
        how = self.rng.random()
        if how < 0.5:
            return f"{self.pick(ADVERBS)} {self.common()} {self.pick(LINKS)} {self.pick((self.common(), self.word()))}"
        return f"{self.name()} {self.pick(DEEDS)} the {self.common()} {self.common()}"

    # values ---------------------------------------------------------------------------------------------------
    def digits(self, low: int = 1, high: int = 6) -> str:
        num = self.between(low, high)
        return str(self.between(1, 9)) + "".join(str(self.between(0, 9)) for _ in range(num - 1))

    def decimal(self) -> str:
        return f"{self.digits(1, 3)}.{self.between(0, 9)}{self.pick(('', '5', '1', '7'))}"

    def email(self) -> str:
        local = self.word() if self.chance(0.7) else self.name().lower()
        extra = self.rng.random()
        if extra < 0.3:
            local += self.pick((".", "_", "-")) + self.word()
        elif extra < 0.45:
            local += self.digits(1, 3)
        return f"{local}@{self.word()}.{self.pick(TLDS)}"

    def path(self) -> str:
        parts = [self.word() if self.chance(0.7) else self.common() for _ in range(self.between(1, 3))]
        return self.pick(("/", "/", "", "./", "~/")) + "/".join(parts) + "." + self.pick(EXTENSIONS)

    def url(self) -> str:
        tail = f"/{self.word()}" if self.chance(0.6) else ""
        return f"{self.pick(('https://', 'https://', 'http://www.'))}{self.word()}.{self.pick(TLDS)}{tail}"

    def ident(self) -> str:
        """An identifier such as KX-2041, b7f3a9 or order_582."""
        how = self.rng.random()
        if how < 0.35:
            return (
                "".join(self.pick(UPPERS) for _ in range(self.between(1, 4)))
                + self.pick(("-", "", "_"))
                + self.digits()
            )
        if how < 0.6:
            return "".join(self.pick(HEX_DIGITS) for _ in range(self.between(4, 8)))
        if how < 0.8:
            return self.word() + self.pick(("_", "-", "")) + self.digits(1, 4)
        return "".join(self.pick(UPPERS) for _ in range(self.between(2, 5)))

    def date(self) -> str:
        return f"{self.between(1990, 2039)}-{self.between(1, 12):02d}-{self.between(1, 28):02d}"

    def clock(self) -> str:
        return f"{self.between(0, 23):02d}:{self.between(0, 11) * 5:02d}"

    def expression(self) -> str:
        ops = "+-*/"
        text = f"{self.digits(1, 3)} {ops[self.between(0, 3)]} {self.digits(1, 3)}"
        if self.chance(0.25):
            text = f"({text}) {ops[self.between(0, 2)]} {self.digits(1, 2)}"
        return text if self.chance(0.5) else text.replace(" ", "")

    def anything(self) -> str:
        """A value of a random kind, for copying."""
        draws = (
            (self.word, 24), (self.phrase, 14), (self.name, 8), (self.city, 7), (self.email, 11), (self.path, 10),
            (self.url, 7), (self.ident, 8), (self.digits, 4), (self.date, 3), (self.title, 4),
        )  # fmt: skip
        at = self.rng.random() * 100
        for draw, share in draws:
            at -= share
            if at < 0:
                return draw()
        return self.word()


@cache
def letter_pieces() -> tuple[str, ...]:
    """The lower-case letter pieces of the shipped tokenizer, so each one is copied as often as the others."""
    file = ASSET_DIR / "tokenizer.json"
    if not file.exists():
        return ()
    vocab = json.loads(file.read_text(encoding="utf-8"))["model"]["vocab"]
    return tuple(sorted(t for t in vocab if t.isascii() and t.isalpha() and t.islower()))


LETTERS = tuple("abcdefghijklmnopqrstuvwxyz")
HEX_DIGITS = tuple("abcdef0123456789")
UPPERS = tuple("ABCDEFGHIJKLMNOPQRSTUVWXYZ")
ONSETS = tuple("b c d f g h j k l m n p r s t v w z br ch cl dr fr gr kr pl pr sh st th tr y qu x".split())
VOWELS = tuple("a e i o u a e i o ai ea ou ee".split())
CODAS = tuple("n r s l t m k d x nd st".split())
TLDS = ("com", "org", "net", "io", "dev")
EXTENSIONS = ("txt", "md", "py", "json", "csv", "log", "yaml", "pdf")
ADVERBS = ("the next", "a new", "our last", "my old", "this", "every", "one more", "no")
LINKS = ("is", "needs", "goes to", "comes from", "starts at", "and the")
DEEDS = ("likes", "found", "sold", "needs", "saw", "lost", "painted", "wants")

NAMES = tuple(
    "Anna Ben Clara David Emma Felix Grace Henry Iris Jack Karl Laura Maria Noah Olga Paul Quinn Rosa Sam Tina Uma "
    "Victor Wendy Xavier Yara Zoe Alice Bob Carol Dan Erik Fatima George Hana Ivan Julia Ken Lena Mark Nina Oscar "
    "Petra Raj Sofia Tom Vera Will Amir Bella Chen Diana Elias Frank Gina Hugo Ines Jonas Kira Leo Mira Nils Otto "
    "Priya Rita Sven Theo Ursula Vince Wanda Yusuf Zara".split()
)
CITIES = tuple(
    "Paris,London,Berlin,Tokyo,Rome,Madrid,Vienna,Oslo,Lisbon,Dublin,Prague,Athens,Cairo,Delhi,Lima,Quito,Boston,"
    "Chicago,Denver,Seattle,Toronto,Sydney,Melbourne,Mumbai,Seoul,Beijing,Shanghai,Bangkok,Jakarta,Manila,Nairobi,"
    "Lagos,Accra,Tunis,Warsaw,Budapest,Helsinki,Stockholm,Copenhagen,Hamburg,Munich,Zurich,Geneva,Milan,Naples,Turin,"
    "Porto,Valencia,Bilbao,Lyon,Nice,Lille,Brussels,Antwerp,Utrecht,Krakow,Riga,Vilnius,Tallinn,Kyoto,Osaka,Hanoi,"
    "Dakar,Miami,Dallas,Austin,Houston,Phoenix,Portland,Bogota,Havana,Perth,New York,San Francisco,Los Angeles,"
    "Mexico City,Buenos Aires,Cape Town,Hong Kong,Tel Aviv,Abu Dhabi,New Delhi,San Diego,Santa Fe".split(",")
)
COMMON = tuple(
    "red blue green white black gold silver small big old new fast slow cold warm dark bright quiet loud soft "
    "hard wild wolf cow fox bear cat dog horse bird fish mouse lion owl frog bee ant tree leaf flower grass river "
    "lake sea hill stone sand rain snow wind cloud storm sun moon star light fire water ice road bridge house "
    "door window garden table chair lamp clock book paper pen letter box bag coat shoe hat ring key coin map card "
    "game ball drum song bread milk cheese apple pear lemon soup rice cake tea coffee salt sugar train plane ship "
    "boat car bike wheel engine rocket robot phone screen cable battery market school office shop farm castle "
    "tower village city summer winter spring morning evening night week month year travel music history science "
    "health sport art story news plan budget report meeting project team price order sale tax loan bank doctor "
    "teacher driver baker pilot".split()
)
