"""Sees what a text has done to a page: what ran, what it became, where the browser was led.

Three kinds of evidence, none of which needs the page's own scripts: hooks that are in every frame
before anything of the page, the requests of the whole browser context, and the elements and
attributes of the page held against those that the dashboard's templates write.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from playwright.sync_api import BrowserContext, Dialog, Page, Request

# In every frame, first of all. What runs says so; what only a payload would call does, too.
HOOKS: Final = """
(() => {
  window.__ran = [];
  const note = (what) => { window.__ran.push(what); window.tell?.(what); };
  window.ran = () => note("ran");
  for (const name of ["alert", "confirm", "prompt", "print", "open"]) {
    window[name] = () => { note(name); };
  }
  const real = window.fetch;
  window.fetch = (...given) => { note("fetch"); return real(...given); };
  const beacon = navigator.sendBeacon.bind(navigator);
  navigator.sendBeacon = (...given) => { note("beacon"); return beacon(...given); };
})();
"""
# What the templates, HTMX and uPlot write; everything else was made by a text.
LOOK: Final = """
() => {
  const words = (text) => new Set(text.split(" "));
  const tags = words("html head meta title link script body a header svg path circle rect span " +
    "button div nav ul ol li p form main h1 h2 h3 section article table caption thead tbody tr " +
    "th td code time label input select option dl dt dd details summary fieldset legend figure " +
    "figcaption del ins q b pre canvas");
  const names = words("lang data-theme charset name content href rel type src defer class id " +
    "tabindex viewBox d cx cy r preserveAspectRatio width height method action hidden role " +
    "data-menu data-theme-name data-theme-toggle data-live data-live-name data-connection " +
    "data-relative datetime title scope data-label data-chart data-plot data-reading value for " +
    "autocomplete required inputmode maxlength placeholder spellcheck autofocus selected checked " +
    "open download data-while-live data-announce data-says hx-ext sse-close sse-swap hx-trigger " +
    "hx-swap");
  const addresses = words("href src action");
  const followed = {"hx-get": /\\/samples$/, "sse-connect": /^\\/admin\\/live($|[?])/};
  const strange = [];
  const isOurs = (value) => {
    const url = new URL(value, document.baseURI);
    return url.origin === location.origin && /^\\/admin($|[/?#])/.test(url.pathname);
  };
  const isStrange = (element, {name, value}) => {
    if (name.startsWith("aria-")) return false;
    if (name === "style") return !element.closest(".uplot");
    if (name === "x") return element.tagName !== "rect";
    if (name in followed) return !followed[name].test(value);
    if (addresses.has(name)) return !isOurs(value);
    return !names.has(name);
  };
  for (const element of document.querySelectorAll("*")) {
    const tag = element.localName;
    if (!tags.has(tag)) strange.push(`<${tag}>`);
    if (tag === "script" && !element.src) strange.push("<script> without an address");
    for (const attribute of element.attributes) {
      if (isStrange(element, attribute)) strange.push(`<${tag} ${attribute.name}>`);
    }
  }
  const texts = (selector, read) => [...document.querySelectorAll(selector)].map(read);
  return {
    text: document.documentElement.textContent,
    title: document.querySelector("title")?.textContent ?? "",
    values: texts("input", (input) => input.getAttribute("value") ?? ""),
    names: texts("[title], [aria-label]",
      (element) => `${element.getAttribute("title")} ${element.getAttribute("aria-label")}`),
    regions: Object.fromEntries(
      texts("[sse-swap]", (region) => [region.getAttribute("sse-swap"), region.textContent])),
    strange,
    ran: window.__ran,
  };
}
"""


@dataclass(frozen=True)
class Seen:
    """A page as its reader has it: its text, what its inputs hold, what is strange in it."""

    text: str
    title: str
    values: list[str]
    names: list[str]
    regions: dict[str, str]
    strange: list[str]
    ran: list[str]

    @property
    def all_text(self) -> str:
        """Everything that can be read, its title, inputs and hints too."""
        return "\n".join([self.text, *self.values, *self.names])


@dataclass
class Detector:
    """Watches a browser context; made before its first page."""

    context: BrowserContext
    ran: list[str] = field(default_factory=list)
    asked: list[tuple[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.context.expose_binding("tell", self._told)
        self.context.add_init_script(HOOKS)
        self.context.on("request", self._request)
        self.context.on("dialog", self._dialog)
        self.context.on("page", lambda page: self.asked.append(("page", page.url)))

    def strangers(self, is_ours: Callable[[str, str], bool]) -> list[str]:
        """List the requests since the last call that no page of ours makes."""
        asked, self.asked = self.asked, []
        return [f"{kind} {address}" for kind, address in asked if not is_ours(kind, address)]

    def _told(self, source: Any, what: str) -> None:
        frame = source["frame"]
        while frame.parent_frame and not frame.url.startswith("http"):
            frame = frame.parent_frame  # the page that made this frame
        self.ran.append(f"{what} in {frame.url[:200]}")

    def _request(self, request: Request) -> None:
        self.asked.append((request.resource_type, request.url))

    def _dialog(self, dialog: Dialog) -> None:
        self.ran.append(f"dialog {dialog.type}")
        dialog.dismiss()


def look(page: Page) -> Seen:
    """Read a page; line ends as the parser of HTML leaves them."""
    return Seen(**page.evaluate(LOOK))


def lines(text: str) -> str:
    """Write the line ends of a text as a page has them."""
    return text.replace("\r\n", "\n").replace("\r", "\n")
