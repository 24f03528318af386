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
  const colour = (name) => getComputedStyle(root).getPropertyValue(name).trim();
  const draw = (element) => {
    if (!window.uPlot) return;
    const plot = element.querySelector("[data-plot]");
    if (!plot) return;
    const data = JSON.parse(element.dataset.chart);
    const width = plot.clientWidth;
    if (!width || data.times.length === 0) return;
    plot.replaceChildren();
    const axis = {
      stroke: colour("--soft"),
      font: "12px system-ui, sans-serif",
      grid: { stroke: colour("--line"), width: 1 },
      ticks: { show: false },
    };
    const compact = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });
    const written = (value) => (value === null ? "–" : `${compact.format(value)} ${data.unit}`);
    const clock = (seconds) => new Date(seconds * 1000).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", hour12: false });
    new window.uPlot(
      {
        width,
        height: 170,
        padding: [10, 8, 0, 0],
        cursor: { y: false, points: { size: 6 }, drag: { x: false, y: false } },
        scales: { y: { range: (_self, _low, high) => [0, high > 0 ? high * 1.12 : 1] } },
        axes: [
          { ...axis, size: 28, space: 70, values: (_self, splits) => splits.map(clock) },
          { ...axis, size: 52, space: 36, values: (_self, splits) => splits.map((value) => compact.format(value)) },
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
  };
  const drawAll = (scope = document) => {
    for (const element of scope.querySelectorAll("[data-chart]")) draw(element);
  };

  // Live regions: a person who reads or holds the focus in a region is not disturbed, and
  // everything that moves can be paused.
  let paused = false;
  const isHeld = (region) => {
    const selection = document.getSelection();
    const selecting = selection && !selection.isCollapsed && region.contains(selection.anchorNode);
    return paused || region.contains(document.activeElement) || selecting;
  };
  const say = (text) => {
    for (const line of document.querySelectorAll("[data-connection]")) {
      line.textContent = text;
      line.hidden = text === "";
    }
  };

  document.addEventListener("htmx:sseBeforeMessage", (event) => {
    if (isHeld(event.target)) event.preventDefault();
  });
  document.addEventListener("htmx:sseMessage", (event) => {
    drawAll(event.target);
    refreshTimes();
  });
  document.addEventListener("htmx:sseOpen", () => say(""));
  document.addEventListener("htmx:sseError", () => {
    say("The live connection is lost; numbers may be old. It is tried again by itself.");
  });
  document.addEventListener("htmx:sseClose", (event) => {
    if (event.detail.type !== "message") return;
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
    }
  });
  document.addEventListener("keydown", (event) => {
    const menu = document.getElementById("menu");
    if (event.key === "Escape" && menu && menu.classList.contains("is-open")) {
      menu.classList.remove("is-open");
      const button = document.querySelector("[data-menu]");
      button.setAttribute("aria-expanded", "false");
      button.focus();
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
    openTables();
    for (const button of document.querySelectorAll("[data-theme-toggle]")) showTheme(button);
    for (const button of document.querySelectorAll("[data-live]")) button.hidden = false;
    refreshTimes();
    drawAll();
    window.setInterval(refreshTimes, 10000);
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
