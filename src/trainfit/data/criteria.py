"""The nine criteria of a depressive episode: what a post is asked about, in our own words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Wording = Literal["short", "full"]


@dataclass(frozen=True, slots=True)
class Criterion:
    """One question to ask of a post."""

    code: str
    symptom: str
    """As the annotations spell it."""
    short: str
    full: str

    def text(self, wording: Wording) -> str:
        """What the model reads."""
        return self.short if wording == "short" else self.full


CRITERIA = (
    Criterion(
        "A.1",
        "DEPRESSED_MOOD",
        "Depressed mood most of the day",
        "The mood is depressed most of the day, nearly every day: the person feels sad, empty or"
        " hopeless, or seems tearful to others.",
    ),
    Criterion(
        "A.2",
        "ANHEDONIA",
        "Loss of interest or pleasure",
        "Interest or pleasure in all or almost all activities is much lower than it was, most of"
        " the day, nearly every day.",
    ),
    Criterion(
        "A.3",
        "APPETITE_CHANGE",
        "Change of appetite or weight",
        "Appetite is lower or higher nearly every day, or weight changes markedly without a diet.",
    ),
    Criterion(
        "A.4",
        "SLEEP_ISSUES",
        "Too little or too much sleep",
        "The person sleeps too little or too much nearly every day.",
    ),
    Criterion(
        "A.5",
        "PSYCHOMOTOR",
        "Restless or slowed down movement",
        "Movement is restless or slowed down nearly every day, so that others can notice it.",
    ),
    Criterion(
        "A.6",
        "FATIGUE",
        "Tiredness or loss of energy",
        "The person is tired or without energy nearly every day.",
    ),
    Criterion(
        "A.7",
        "WORTHLESSNESS",
        "Feeling worthless or guilty",
        "The person feels worthless, or guilty beyond reason, nearly every day.",
    ),
    Criterion(
        "A.8",
        "COGNITIVE_ISSUES",
        "Trouble thinking, concentrating or deciding",
        "Thinking, concentrating or deciding is harder than it was, nearly every day.",
    ),
    Criterion(
        "A.9",
        "SUICIDAL_THOUGHTS",
        "Thoughts of death or suicide",
        "Thoughts of death or of suicide come back again and again, with or without a plan or an"
        " attempt.",
    ),
)
SPECIAL_CASE = "SPECIAL_CASE"
"""A mark of the annotations that is no criterion; no pair is made of it."""
