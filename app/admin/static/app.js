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
    const written = (value) => (value === null ? "–" : `${short(value)} ${data.unit}`);
    const clock = (seconds) => new Date(seconds * 1000).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", hour12: false });
    const chart = new window.uPlot(
      {
        width,
        height: 170,
        padding: [10, 8, 0, 0],
        cursor: { y: false, points: { size: 6 }, drag: { x: false, y: false } },
        scales: { y: { range: (_self, _low, high) => [0, high > 0 ? high * 1.12 : 1] } },
        axes: [
          { ...axis, size: 28, space: 70, values: (_self, splits) => splits.map(clock) },
          { ...axis, size: 52, space: 36, values: (_self, splits) => splits.map(short) },
        ],
        series: [
          { label: "Time", value: (_self, value) => (value === null ? "–" : clock(value)) },
          {
            label: data.label,
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
            value: (_self, value) => written(value),
          },
        ],
      },
      [data.times, data.values],
      plot,
    );
    charts.set(plot, chart);
  };
  const drawAll = (scope = document) => {
    for (const element of scope.querySelectorAll("[data-chart]")) draw(element);
  };

  // Browsers allow six connections to a host, over all tabs: a hidden tab gives its own back, and
  // asks for everything anew when it is looked at.
  class VisibleSource {
    constructor(url) {
      this.url = url;
      this.listeners = [];
      this.source = null;
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
  // a region was not given is kept for the moment when the region is free.
  let paused = false;
  const missed = new Map();
  const isHeld = (region) => {
    const selection = document.getSelection();
    const selecting = selection && !selection.isCollapsed && region.contains(selection.anchorNode);
    const focused = document.activeElement;
    // A click anywhere on a table that scrolls gives it the focus; that alone holds nothing back.
    const focusing = region.contains(focused) && !focused.matches(".table");
    return paused || focusing || selecting;
  };
  // What a person did to the tables of a region: how far they are scrolled, which has the focus.
  const tables = (region) => [...region.querySelectorAll(".table")];
  const placesOf = (region) =>
    tables(region).map((table) => [table.scrollLeft, table === document.activeElement]);
  const restore = (region, places) => {
    openTables();
    tables(region).forEach((table, index) => {
      const [left, hadFocus] = places[index] ?? [0, false];
      table.scrollLeft = left;
      if (hadFocus) table.focus({ preventScroll: true });
    });
  };
  const places = new WeakMap();
  const catchUp = () => {
    for (const [region, text] of missed) {
      if (region.isConnected && isHeld(region)) continue;
      missed.delete(region);
      if (!region.isConnected) continue;
      const kept = placesOf(region);
      window.htmx.swap(region, text, { swapStyle: "innerHTML", swapDelay: 0, settleDelay: 0 });
      restore(region, kept);
      drawAll(region);
      refreshTimes();
    }
  };
  const say = (text) => {
    for (const line of document.querySelectorAll("[data-connection]")) {
      line.textContent = text;
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
  });
  document.addEventListener("htmx:sseMessage", (event) => {
    restore(event.target, places.get(event.target) ?? []);
    drawAll(event.target);
    refreshTimes();
  });
  document.addEventListener("htmx:sseOpen", () => say(""));
  document.addEventListener("htmx:sseError", () => {
    say("The live connection is lost; numbers may be old. It is tried again by itself.");
  });
  document.addEventListener("htmx:sseClose", (event) => {
    if (event.detail.type !== "message") return;
    paused = false; // the button goes away, and the last texts are still to be shown
    say(event.target.dataset.endSays ?? "");
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
      live.dataset.live = paused ? "paused" : "on";
      live.setAttribute("aria-pressed", String(paused));
      live.querySelector("[data-live-name]").textContent = paused ? "Paused" : "Live";
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
