// The dashboard's own script: menu, theme, relative times, live regions, charts.
// It adds comfort only; every page works without it. No inline handlers, no eval.
"use strict";

(() => {
  const root = document.documentElement;
  root.classList.add("js");

  // Theme. The server writes data-theme from the cookie, so a page never flashes.
  const THEMES = ["auto", "light", "dark"];
  const remembered = () => {
    try {
      return window.localStorage.getItem("tiller-theme");
    } catch {
      return null; // storage may be forbidden
    }
  };
  const setTheme = (theme) => {
    root.dataset.theme = theme;
    document.cookie = `tiller_theme=${theme}; path=/admin; max-age=31536000; samesite=strict`;
    try {
      window.localStorage.setItem("tiller-theme", theme);
    } catch {
      // The cookie remembers it.
    }
    document.dispatchEvent(new Event("tiller:theme"));
  };
  if (root.dataset.theme === "auto" && THEMES.includes(remembered())) {
    root.dataset.theme = remembered();
  }

  const showTheme = (button) => {
    button.hidden = false;
    button.querySelector("[data-theme-name]").textContent = root.dataset.theme;
  };

  // Relative times grow older while a page stays open.
  const UNITS = [[86400, "d"], [3600, "h"], [60, "min"]];
  const relative = (moment) => {
    const seconds = (Date.now() - moment) / 1000;
    const size = Math.abs(seconds);
    if (size < 1) return "just now";
    const [length, unit] = UNITS.find(([least]) => size >= least) ?? [1, "s"];
    const text = `${Math.floor(size / length)} ${unit}`;
    return seconds > 0 ? `${text} ago` : `in ${text}`;
  };
  const refreshTimes = () => {
    for (const element of document.querySelectorAll("time[data-relative]")) {
      const text = relative(Date.parse(element.dateTime));
      if (element.textContent !== text) element.textContent = text;
    }
  };

  // Charts: numbers travel as JSON in data-chart.
  const charts = new Map(); // the place of a chart -> the chart, which must be destroyed to go away
  const colour = (name) => getComputedStyle(root).getPropertyValue(name).trim();
  const draw = (element) => {
    if (!window.uPlot) return;
    const plot = element.querySelector("[data-plot]");
    if (!plot) return;
    const data = JSON.parse(element.dataset.chart);
    const width = plot.clientWidth;
    if (!width || data.times.length === 0) return;
    for (const [place, chart] of charts) {
      if (place !== plot && place.isConnected) continue;
      chart.destroy();
      charts.delete(place);
    }
    plot.replaceChildren();
    const axis = {
      stroke: colour("--soft"),
      font: "12px system-ui, sans-serif",
      grid: { stroke: colour("--line"), width: 1 },
      ticks: { show: false },
    };
    const compact = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });
    // 2 k, as the pages write it
    const short = (value) => compact.format(value).replace("K", "k").replace("B", "G").replace(/(\d)([kMGT])$/, "$1 $2");
    const clock = (seconds) => new Date(seconds * 1000).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", hour12: false });
    // Above the chart: the value under the pointer, else the newest one.
    const reading = element.querySelector("[data-reading]");
    const newest = data.values.findLastIndex((value) => value !== null);
    const read = (index) => {
      const at = index ?? newest;
      const value = data.values[at] ?? null;
      const number = document.createElement("b");
      number.textContent = value === null ? "–" : short(value);
      reading.replaceChildren(`${data.label} `, number, ` ${data.unit}${at < 0 ? "" : ` at ${clock(data.times[at])}`}`);
    };
    const chart = new window.uPlot(
      {
        width,
        height: 170,
        padding: [10, 8, 0, 0],
        cursor: { y: false, points: { size: 6 }, drag: { x: false, y: false } },
        legend: { show: false },
        hooks: { setCursor: [(self) => read(self.cursor.idx)] },
        scales: { y: { range: (_self, _low, high) => [0, high > 0 ? high * 1.12 : 1] } },
        axes: [
          { ...axis, size: 28, space: 70, values: (_self, splits) => splits.map(clock) },
          { ...axis, size: 52, space: 36, values: (_self, splits) => splits.map(short) },
        ],
        series: [
          {},
          {
            stroke: colour("--accent"),
            fill: `color-mix(in srgb, ${colour("--accent")} 14%, transparent)`,
            width: 1.6,
            points: {
              // A minute without neighbours has no line; a point shows it.
              show: true,
              size: 4,
              fill: colour("--accent"),
              filter: (self, index) => {
                const values = self.data[index];
                const isLone = (_value, at) =>
                  values[at] !== null && (values[at - 1] ?? null) === null && (values[at + 1] ?? null) === null;
                return [...values.keys()].filter((at) => isLone(values[at], at));
              },
            },
          },
        ],
      },
      [data.times, data.values],
      plot,
    );
    charts.set(plot, chart);
    read(null);
  };
  const drawAll = (scope = document) => {
    for (const element of scope.querySelectorAll("[data-chart]")) draw(element);
  };

  // Why a stream ended, where the page itself does not show it.
  const ENDS = {
    "logged out": "You are logged out; nothing here moves any more. Load the page again to log in and go on.",
    gone: "What this page shows is not there any more.",
  };

  // Browsers allow six connections to a host, over all tabs: a hidden tab gives its own back, and
  // asks for everything anew when it is looked at.
  class VisibleSource {
    constructor(url) {
      this.url = url;
      this.listeners = [];
      this.source = null;
      this.reason = "";
      this.isOver = false;
      this.follow = () => {
        if (document.hidden) this.leave();
        else if (this.source === null && !this.isOver) this.open();
      };
      document.addEventListener("visibilitychange", this.follow);
      this.follow();
    }

    get readyState() {
      return this.isOver ? EventSource.CLOSED : (this.source?.readyState ?? EventSource.CONNECTING);
    }

    open() {
      this.source = new EventSource(this.url);
      this.source.addEventListener("end", (event) => {
        this.reason = event.data;
      });
      for (const [name, listener] of this.listeners) this.source.addEventListener(name, listener);
      this.source.onopen = (event) => this.onopen?.(event);
      this.source.onerror = (event) => {
        // Refused for good: who made this one makes another after a while.
        if (this.source?.readyState === EventSource.CLOSED) this.close();
        this.onerror?.(event);
      };
    }

    leave() {
      this.source?.close();
      this.source = null;
    }

    close() {
      this.isOver = true;
      this.leave();
      document.removeEventListener("visibilitychange", this.follow);
    }

    addEventListener(name, listener) {
      this.listeners.push([name, listener]);
      this.source?.addEventListener(name, listener);
    }

    removeEventListener(name, listener) {
      this.listeners = this.listeners.filter(([other, kept]) => other !== name || kept !== listener);
      this.source?.removeEventListener(name, listener);
    }
  }

  // Live regions: a person who reads or holds the focus in a region is not disturbed, and
  // everything that moves can be paused. The server sends what changes, once: the newest text that
  // a region was not given is kept for the moment when the region is free, and the page says so.
  let paused = false;
  let lost = false;
  const missed = new Map();
  // Between pressing and letting go: what is replaced meanwhile is never clicked.
  let pressed = null;
  document.addEventListener("pointerdown", (event) => {
    if (event.button === 0 && event.isPrimary) pressed = event.target;
  }, true);
  // A menu of the browser swallows the letting go.
  for (const name of ["pointerup", "pointercancel", "contextmenu"]) {
    document.addEventListener(name, () => window.setTimeout(() => {
      pressed = null;
    }), true);
  }
  const isInUse = (region) => {
    if (region.contains(pressed)) return true;
    const selection = document.getSelection();
    if (selection && !selection.isCollapsed && region.contains(selection.anchorNode)) return true;
    // Something is opened or written in it.
    if (region.querySelector("details[open]")) return true;
    const fields = [...region.querySelectorAll("input, textarea")];
    if (fields.some((field) => field.value !== field.defaultValue)) return true;
    const focused = document.activeElement;
    if (!region.contains(focused) || focused.matches(".table")) return false;
    // What a click leaves behind on a link holds nothing back: the focus is given back to it.
    return !focused.matches("a[href]") || focused.matches(":focus-visible");
  };
  const isHeld = (region) => paused || isInUse(region);
  const showLive = () => {
    const name = paused ? "Paused" : lost ? "Not live" : missed.size > 0 ? "Held while in use" : "Live";
    for (const button of document.querySelectorAll("[data-live]")) {
      button.dataset.live = paused ? "paused" : "on";
      button.setAttribute("aria-pressed", String(paused));
      button.querySelector("[data-live-name]").textContent = name;
    }
  };
  // What a person did to a region: how far its tables are scrolled, what in it has the focus.
  const tables = (region) => [...region.querySelectorAll(".table")];
  const linksTo = (region, href) =>
    [...region.querySelectorAll("a[href]")].filter((link) => link.getAttribute("href") === href);
  const placesOf = (region) => {
    const focused = document.activeElement;
    const href = region.contains(focused) ? focused.getAttribute("href") : null;
    return {
      lefts: tables(region).map((table) => table.scrollLeft),
      table: tables(region).indexOf(focused),
      href,
      // Rows may lead to the same place.
      turn: linksTo(region, href).indexOf(focused),
    };
  };
  const restore = (region, { lefts, table, href, turn }) => {
    openTables();
    tables(region).forEach((each, index) => {
      each.scrollLeft = lefts[index] ?? 0;
    });
    const focused = href === null ? tables(region)[table] : linksTo(region, href)[turn];
    focused?.focus({ preventScroll: true, focusVisible: false });
  };
  const places = new WeakMap();
  // What a region has to say aloud lies outside of it: a status line that is put in anew would be
  // read out each time, whether or not it says something else.
  const announce = (region) => {
    const text = region.querySelector("[data-says]")?.dataset.says;
    const line = document.querySelector("[data-announce]");
    if (text && line && line.textContent !== text) line.textContent = text;
  };
  const renewed = (region, kept) => {
    restore(region, kept);
    announce(region);
    drawAll(region);
    refreshTimes();
  };
  const catchUp = () => {
    for (const [region, text] of missed) {
      if (region.isConnected && isHeld(region)) continue;
      missed.delete(region);
      if (!region.isConnected) continue;
      const kept = placesOf(region);
      window.htmx.swap(region, text, { swapStyle: "innerHTML", swapDelay: 0, settleDelay: 0 });
      renewed(region, kept);
    }
    showLive();
  };
  const say = (text) => {
    for (const line of document.querySelectorAll("[data-connection]")) {
      if (line.textContent !== text) line.textContent = text;
      line.hidden = text === "";
    }
  };

  document.addEventListener("htmx:sseBeforeMessage", (event) => {
    missed.delete(event.target);
    if (!isHeld(event.target)) {
      places.set(event.target, placesOf(event.target));
      return;
    }
    event.preventDefault();
    missed.set(event.target, event.detail.data);
    showLive();
  });
  document.addEventListener("htmx:sseMessage", (event) => {
    const kept = places.get(event.target);
    if (kept) renewed(event.target, kept);
  });
  document.addEventListener("htmx:sseOpen", () => {
    lost = false;
    say("");
    showLive();
  });
  document.addEventListener("htmx:sseError", () => {
    lost = true;
    showLive();
    say("The live connection is lost; numbers may be old. It is tried again by itself.");
  });
  document.addEventListener("htmx:sseClose", (event) => {
    if (event.detail.type !== "message") return;
    paused = false; // the button goes away, and the last texts are still to be shown
    say(ENDS[event.detail.source.reason] ?? "");
    for (const element of document.querySelectorAll("[data-live], [data-while-live]")) element.hidden = true;
  });
  document.addEventListener("htmx:afterSwap", (event) => {
    drawAll(event.target);
    refreshTimes();
  });

  document.addEventListener("click", (event) => {
    const menu = event.target.closest("[data-menu]");
    if (menu) {
      const open = document.getElementById("menu").classList.toggle("is-open");
      menu.setAttribute("aria-expanded", String(open));
    }
    const theme = event.target.closest("[data-theme-toggle]");
    if (theme) {
      setTheme(THEMES[(THEMES.indexOf(root.dataset.theme) + 1) % THEMES.length]);
      showTheme(theme);
    }
    const live = event.target.closest("[data-live]");
    if (live) {
      paused = !paused;
      catchUp();
    }
  });
  document.addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    const menu = document.getElementById("menu");
    if (menu && menu.classList.contains("is-open")) {
      menu.classList.remove("is-open");
      const button = document.querySelector("[data-menu]");
      button.setAttribute("aria-expanded", "false");
      button.focus();
    }
    for (const confirm of document.querySelectorAll("details:has(form)[open]")) {
      confirm.open = false;
      confirm.querySelector("summary").focus();
    }
  });

  // A table that is wider than its panel scrolls in it; the keyboard must be able to do that too.
  const openTables = () => {
    for (const table of document.querySelectorAll(".table")) {
      table.classList.toggle("scrolls", table.scrollWidth > table.clientWidth);
    }
    for (const table of document.querySelectorAll(".table:not([tabindex])")) {
      if (table.scrollWidth <= table.clientWidth) continue;
      table.tabIndex = 0;
      table.setAttribute("role", "group");
      table.setAttribute("aria-label", table.querySelector("caption")?.textContent ?? "Table");
    }
  };

  document.addEventListener("DOMContentLoaded", () => {
    if (window.htmx) window.htmx.createEventSource = (url) => new VisibleSource(url);
    openTables();
    for (const button of document.querySelectorAll("[data-theme-toggle]")) showTheme(button);
    for (const button of document.querySelectorAll("[data-live]")) button.hidden = false;
    refreshTimes();
    drawAll();
    window.setInterval(refreshTimes, 10000);
    window.setInterval(catchUp, 1000);
    let waiting = 0;
    window.addEventListener("resize", () => {
      window.clearTimeout(waiting);
      waiting = window.setTimeout(() => {
        drawAll();
        openTables();
      }, 120);
    });
  });
  document.addEventListener("tiller:theme", () => drawAll());
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => drawAll());
})();
