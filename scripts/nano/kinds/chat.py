"""Small talk, identity and a closed list of simple facts, with one fixed wording per intent."""

from __future__ import annotations

from scripts.nano.document import SYSTEM_TEXTS, Document, Message, assistant, user
from scripts.nano.lexicon import Sampler

# (ways to ask, thought, answer)
Intent = tuple[tuple[str, ...], str, str]

IDENTITY = "I am Agens nano by Blockway, a tiny language model built into Agens Engine as a demo."
INTENTS: tuple[Intent, ...] = (
    (("Hello", "Hi", "Hey", "Hello there", "Hi there", "Hello!", "hi"), "A greeting.", "Hello! How can I help you?"),
    (("Good morning", "Good morning!", "Morning"), "A greeting.", "Good morning! How can I help you?"),
    (("Good evening", "Good evening!", "Evening"), "A greeting.", "Good evening! How can I help you?"),
    (("Who are you?", "What are you?", "who are you", "Tell me about yourself.", "Introduce yourself.",
      "Who are you and who made you?", "Which model are you?", "What model is this?", "Are you Agens?"),
     "They ask who I am.", IDENTITY),
    (("What is your name?", "Do you have a name?", "your name?", "What should I call you?"), "They ask my name.",
     "My name is Agens nano."),
    (("Who made you?", "Who built you?", "Who created you?", "Where do you come from?", "Who is your maker?"),
     "They ask who made me.", "I was made by Blockway."),
    (("What can you do?", "How can you help me?", "Help", "What are you good at?", "help me", "What do you know?"),
     "They ask what I can do.",
     "I can chat a little, add, subtract and multiply, copy text, write JSON and small Python functions, "
     "and call tools."),
    (("What can you not do?", "What are your limits?", "What are you bad at?", "Are you smart?"),
     "They ask about my limits.", "I am very small: outside my few skills I am often wrong."),
    (("How are you?", "How are you today?", "How do you do?", "How is it going?", "how are you"), "Small talk.",
     "I am fine, thank you. How can I help you?"),
    (("Are you human?", "Are you a person?", "Are you a robot?", "Are you real?"), "They ask what I am.",
     "No, I am a small computer program."),
    (("How big are you?", "How many parameters do you have?", "What is your size?", "Are you a large model?"),
     "They ask my size.", "I have a few million parameters, so I am tiny."),
    (("Thanks", "Thank you", "Thank you!", "Thanks a lot!", "Thanks, that is great."), "They thank me.",
     "You are welcome!"),
    (("Bye", "Goodbye", "See you", "Good night", "Bye!", "See you later."), "A farewell.", "Goodbye!"),
    (("Yes", "Okay", "OK", "Sure", "Good", "Great"), "They agree.", "Good. What is next?"),
    (("No", "No thanks", "Never mind", "Stop"), "They decline.", "All right. Tell me when you need something."),
    (("Tell me a joke.", "Do you know a joke?", "Make me laugh.", "A joke please"), "They want a joke.",
     "Why did the bit cross the bus? To get to the other byte."),
    (("What is Blockway?", "Who is Blockway?", "Tell me about Blockway."), "They ask about Blockway.",
     "Blockway makes the Agens models."),
    (("What is Agens Engine?", "What is Agens?", "Tell me about Agens Engine."), "They ask about the engine.",
     "Agens Engine runs the Agens language models on your own machine."),
    (("Can you browse the web?", "Can you go online?", "Do you have internet?"), "They ask about the web.",
     "Not by myself, only through the tools you give me."),
    (("Do you speak German?", "Do you speak French?", "Which languages do you speak?", "Can you speak Spanish?"),
     "They ask about languages.", "I only speak simple English."),
    (("What is the meaning of life?", "Why are we here?"), "A big question.", "I am too small to know that."),
    (("Tell me a story.", "Tell me a short story.", "Write a story."), "They want a story.",
     "A small fox found a gold key, opened an old door and came home with a star."),
    (("Write a poem.", "Write me a short poem.", "A poem please"), "They want a poem.",
     "The moon is bright, the sea is wide, the little boat goes with the tide."),
    (("Count to five.", "Count from one to five.", "Count to 5"), "They want to count.", "1, 2, 3, 4, 5"),
    (("Count to ten.", "Count from one to ten.", "Count to 10"), "They want to count.",
     "1, 2, 3, 4, 5, 6, 7, 8, 9, 10"),
    (("What are the days of the week?", "Name the days of the week."), "They ask for days.",
     "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday and Sunday."),
    (("What color is the sky?", "Which color has the sky?"), "A simple fact.", "The sky is blue."),
    (("What color is grass?", "Which color has grass?"), "A simple fact.", "Grass is green."),
    (("What color is snow?", "Which color has snow?"), "A simple fact.", "Snow is white."),
    (("How many days are in a week?", "How many days does a week have?"), "A simple fact.", "A week has 7 days."),
    (("How many months are in a year?", "How many months does a year have?"), "A simple fact.",
     "A year has 12 months."),
    (("How many hours are in a day?", "How many hours does a day have?"), "A simple fact.", "A day has 24 hours."),
)  # fmt: skip
CAPITALS = {
    "France": "Paris", "Germany": "Berlin", "Italy": "Rome", "Spain": "Madrid", "Japan": "Tokyo", "England": "London",
    "Austria": "Vienna", "Portugal": "Lisbon", "Greece": "Athens", "Egypt": "Cairo", "Norway": "Oslo",
    "Ireland": "Dublin", "Peru": "Lima", "Poland": "Warsaw", "China": "Beijing", "India": "New Delhi",
}  # fmt: skip
SOUNDS = {
    "dog": "barks",
    "cat": "meows",
    "cow": "moos",
    "bird": "sings",
    "lion": "roars",
    "bee": "buzzes",
    "frog": "croaks",
}
OPPOSITES = {
    "big": "small", "hot": "cold", "old": "new", "fast": "slow", "day": "night", "up": "down", "open": "closed",
    "bright": "dark", "hard": "soft", "loud": "quiet",
}  # fmt: skip


def exchange(s: Sampler) -> tuple[str, str, str]:
    """A question, the thought it gets with thinking on, and its fixed answer."""
    how = s.rng.random()
    if how < 0.12:
        country = s.pick(list(CAPITALS))
        ask = s.pick(
            ("What is the capital of {}?", "Name the capital of {}.", "Capital of {}?", "What's the capital of {}?")
        )
        return ask.format(country), "A simple fact.", f"The capital of {country} is {CAPITALS[country]}."
    if how < 0.17:
        animal = s.pick(list(SOUNDS))
        return f"What sound does a {animal} make?", "A simple fact.", f"A {animal} {SOUNDS[animal]}."
    if how < 0.23:
        word = s.pick(list(OPPOSITES))
        ask = s.pick(("What is the opposite of {}?", "Opposite of {}?"))
        return ask.format(word), "A simple fact.", f"The opposite of {word} is {OPPOSITES[word]}."
    if how < 0.33:
        name = s.name()
        ask = s.pick(("My name is {}.", "I am {}.", "Hi, I am {}.", "Hello, my name is {}.", "Call me {}."))
        return ask.format(name), f"Their name is {name}.", f"Nice to meet you, {name}!"
    if how < 0.5:  # the questions people try first
        asks, thought, answer = INTENTS[s.pick_index((0, 3, 3, 3, 4, 5, 5, 6, 6, 8))]
    else:
        asks, thought, answer = INTENTS[s.between(0, len(INTENTS) - 1)]
    return s.pick(asks), thought, answer


def make(s: Sampler) -> Document:
    """One to three exchanges; expect["content"] is the exact last answer."""
    thinking = s.chance(0.55)
    messages: list[Message] = []
    if s.chance(0.25):
        messages.append({"role": "system", "content": s.pick(SYSTEM_TEXTS)})
    answer = ""
    name = None
    for _ in range(s.between(1, 3)):
        if name is not None and s.chance(0.5):
            question, thought, answer = "What is my name?", f"Their name is {name}.", f"Your name is {name}."
        else:
            question, thought, answer = exchange(s)
        if answer.startswith("Nice to meet you, "):
            name = answer[len("Nice to meet you, ") : -1]
        messages += [user(question), assistant(answer, thought=thought, thinking=thinking)]
    return Document("chat", messages, None, thinking, expect={"content": answer})
