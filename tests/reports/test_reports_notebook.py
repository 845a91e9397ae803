from collections.abc import Callable
from xml.etree import ElementTree

from trainfit.core.plan_records import Plan
from trainfit.core.records import Receipt, ReceiptItem


def test_a_plan_shows_as_a_table(make_plan: Callable[..., Plan]):
    page = ElementTree.fromstring(make_plan(gpu="<b>&")._repr_html_())
    top = {row[0].text: row[1] for row in page}
    assert top["fits"].text == "yes"
    assert top["gpu"].text == "<b>&"
    memory = {row[0].text: row[1].text for row in top["memory"][0]}
    assert memory["peak reserved gib"] == "17.5"
    heads, first, _ = top["reasons"][0]
    assert [cell.text for cell in heads] == ["setting", "value", "why", "alternatives"]
    assert first[2].text == "the GPU has it in its matrix units"


def test_a_plan_prints_as_its_verdict_and_settings(make_plan: Callable[..., Plan]):
    first, *rows = repr(make_plan()).splitlines()
    assert first == "Fits rtx_4090: predicted peak 17.50 GiB ± 1.5% of 23.50 GiB (74%)"
    assert rows == [
        "precision   bf16  the GPU has it in its matrix units",
        "batch_size  8     the largest that fits",
    ]
    assert repr(make_plan(reasons=(), memory=None)) == "Fits rtx_4090: memory not estimated"


def test_a_receipt_prints_as_its_table_and_verdict():
    rows = (("tf32", True, "active", 5), ("compile", False, "not_active", 99))
    items = tuple(
        ReceiptItem(name=name, requested=True, observed=on, status=status, evidence="x" * size)
        for name, on, status, size in rows
    )
    shown = repr(Receipt(run="runs/a", items=items)).splitlines()
    assert shown[:2] == ["Receipt of runs/a", "tf32     active      xxxxx"]
    assert len(shown[2]) == 100
    assert shown[2].endswith("x…")
    assert shown[3] == "Asked for and not active: compile."
    assert repr(Receipt(run="a", items=())).endswith("Everything that was asked for was active.")
