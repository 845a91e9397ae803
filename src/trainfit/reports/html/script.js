"use strict";
(() => {
  const root = document.documentElement;
  const button = document.getElementById("theme");
  const themes = ["auto", "light", "dark"];
  const show = (theme) => {
    if (theme === "auto") delete root.dataset.theme;
    else root.dataset.theme = theme;
    button.textContent = theme;
  };
  let theme = "auto";
  try { theme = localStorage.getItem("trainfit-theme") || "auto"; } catch { /* not allowed: stay with auto */ }
  show(themes.includes(theme) ? theme : "auto");
  button.hidden = false;
  button.addEventListener("click", () => {
    theme = themes[(themes.indexOf(button.textContent) + 1) % themes.length];
    show(theme);
    try { localStorage.setItem("trainfit-theme", theme); } catch { /* it is forgotten then */ }
  });

  for (const key of document.querySelectorAll(".legend button")) {
    key.addEventListener("click", () => {
      const off = key.classList.toggle("off");
      for (const path of key.closest("section").querySelectorAll("path.series")) {
        if (path.dataset.name === key.dataset.name) path.classList.toggle("off", off);
      }
    });
  }

  const plots = JSON.parse(document.getElementById("numbers").textContent);
  const tip = document.getElementById("tip");
  const duration = (s) => s < 1 ? `${+(s * 1000).toPrecision(3)} ms` : s < 60 ? `${s.toFixed(1)} s` : `${(s / 60).toFixed(1)} min`;
  const plain = (v) => Math.abs(v) >= 1000 ? Math.round(v).toLocaleString("en") : String(+v.toPrecision(4));
  const forms = {
    number: plain, count: (v) => Math.round(v).toLocaleString("en"), percent: (v) => `${(v * 100).toFixed(1)}%`,
    gib: (v) => `${v.toFixed(2)} GiB`, duration, celsius: (v) => `${Math.round(v)} °C`, watts: (v) => `${Math.round(v)} W`,
  };

  const nearest = (xs, x) => {
    let low = 0, high = xs.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (xs[middle] < x) low = middle + 1; else high = middle;
    }
    return low > 0 && x - xs[low - 1] < xs[low] - x ? low - 1 : low;
  };
  const element = (tag, text, kind) => {
    const made = document.createElement(tag);
    if (text !== undefined) made.textContent = text;
    if (kind) made.className = kind;
    return made;
  };

  const describe = (plot, hidden, x) => {
    const rows = [];
    let at = null;
    for (const [name, color, xs, ys] of plot.series) {
      if (hidden.has(name) || !xs.length) continue;
      const index = nearest(xs, x);
      if (at === null) at = xs[index];
      const row = element("p"), label = element("span", name);
      label.prepend(element("i", undefined, `c${color}`));
      row.append(label, element("b", ys[index] === null ? "not finite" : forms[plot.form](ys[index])));
      rows.push(row);
    }
    const reach = (plot.x[1] - plot.x[0]) / 60;
    for (const [where, event, text] of plot.marks) {
      if (Math.abs(where - x) < reach) rows.push(element("p", `${event} at ${where}: ${text}`, "event"));
    }
    if (at !== null) rows.unshift(element("small", `${plot.x[2]} ${plain(at)}`));
    return [rows, at];
  };

  for (const [id, plot] of Object.entries(plots)) {
    const area = document.getElementById(id)?.querySelector(".area");
    if (!area) continue;
    const cross = area.querySelector(".cross");
    area.addEventListener("pointermove", (event) => {
      const box = area.getBoundingClientRect();
      const share = Math.min(Math.max((event.clientX - box.left) / box.width, 0), 1);
      const off = [...area.querySelectorAll("path.off")].map((path) => path.dataset.name);
      const [rows, at] = describe(plot, new Set(off), plot.x[0] + share * (plot.x[1] - plot.x[0]));
      if (at === null) return;
      cross.style.display = "block";
      cross.style.left = `${100 * (at - plot.x[0]) / (plot.x[1] - plot.x[0])}%`;
      tip.replaceChildren(...rows);
      tip.style.display = "block";
      const left = event.clientX + 14 + tip.offsetWidth < innerWidth ? event.clientX + 14 : event.clientX - 14 - tip.offsetWidth;
      tip.style.left = `${Math.max(4, left)}px`;
      tip.style.top = `${Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 4)}px`;
    });
    const leave = () => { cross.style.display = tip.style.display = "none"; };
    area.addEventListener("pointerleave", leave);
    area.addEventListener("pointercancel", leave);
  }
})();
