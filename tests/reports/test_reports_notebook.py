from collections.abc import Callable
from xml.etree import ElementTree

from trainfit.core.plan_records import Plan


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
