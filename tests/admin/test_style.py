"""Colours of the style sheet, by the numbers: what axe does not measure.

WCAG 1.4.11 wants 3:1 between whatever can be pressed or typed into and the ground that it lies on.
"""

import re
from itertools import product
from pathlib import Path

import pytest

from app.admin import pages

SHEET = (Path(pages.__file__).parent / "static" / "style.css").read_text()
GROUNDS = ("--page", "--panel", "--sunk")
NON_TEXT_RATIO_MIN = 3.0


def declarations(selector: str) -> dict[str, str]:
    """Give the declarations of the first rule with exactly this selector."""
    body, *_ = re.findall(rf"^ *{re.escape(selector)} {{([^}}]*)}}", SHEET, re.MULTILINE)
    found = (line.partition(":") for line in body.split(";") if ":" in line)
    return {re.sub(r".*\s", "", name.strip()): value.strip() for name, _, value in found}


LIGHT = declarations(":root")
THEMES = {
    "light": LIGHT,
    "dark by the system": LIGHT | declarations(':root:not([data-theme="light"])'),
    "dark by choice": LIGHT | declarations(':root[data-theme="dark"]'),
}


def luminance(colour: str) -> float:
    """Give the relative luminance of #rrggbb, as WCAG defines it."""
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def ratio(one: str, other: str) -> float:
    """Give the contrast of two colours, 1 to 21."""
    darker, lighter = sorted((luminance(one), luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


def border_of(selector: str) -> str:
    """Name the property that a rule draws its border with."""
    rule = declarations(selector)
    (name,) = re.findall(r"var\((--[a-z-]+)\)", rule.get("border-color") or rule["border"])
    return str(name)


def test_black_on_white_has_the_contrast_that_wcag_names():
    assert ratio("#000000", "#ffffff") == pytest.approx(21.0)
    assert ratio("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)


@pytest.mark.parametrize(("theme", "ground"), list(product(THEMES, GROUNDS)))
@pytest.mark.parametrize(
    "selector",
    ["input, select, textarea", "button.quiet, .button.quiet", "button.danger, .button.danger"],
)
def test_the_border_of_what_can_be_used_stands_out_in_every_theme(theme, ground, selector):
    colours = THEMES[theme]
    assert ratio(colours[border_of(selector)], colours[ground]) >= NON_TEXT_RATIO_MIN


@pytest.mark.parametrize(("theme", "ground"), list(product(THEMES, GROUNDS)))
def test_a_filled_button_stands_out_in_every_theme(theme, ground):
    colours = THEMES[theme]
    assert "var(--accent)" in declarations("button, .button")["background"]
    assert ratio(colours["--accent"], colours[ground]) >= NON_TEXT_RATIO_MIN


def test_both_ways_to_the_dark_theme_give_the_same_colours():
    assert THEMES["dark by the system"] == THEMES["dark by choice"]
    assert THEMES["light"] != THEMES["dark by choice"]
