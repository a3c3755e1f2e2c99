// The server renders everything. When it says that something changed, the page fetches itself and
// takes over the parts that differ; without scripts it is the same page, reloaded by hand.
"use strict";

const REST_MS = 2000; // between two fetches, however often something changes
const live = document.getElementById("live");
let due = 0, fetched = 0, busy = false, source = null;

function show(state, text) {
  if (live.dataset.state === state) return;
  live.dataset.state = state;
  live.firstElementChild.textContent = text;
  live.title = text;
}

function isInUse(part) {
  const { activeElement } = document;
  const selection = getSelection();
  return (part.contains(activeElement) && activeElement.matches("input, select, .scroll, pre"))
    || (!selection.isCollapsed && part.contains(selection.anchorNode));
}

function takeOver(fresh) {
  for (const part of fresh.querySelectorAll("[data-live]")) {
    const here = document.getElementById(part.id);
    if (!here || here.innerHTML === part.innerHTML || isInUse(here)) continue;
    const focused = here.contains(document.activeElement) && document.activeElement;
    const mark = focused && (focused.getAttribute("href") || focused.dataset.copy);
    const offsets = [...here.querySelectorAll(".scroll, pre")].map((box) => [box.scrollLeft, box.scrollTop]);
    here.replaceChildren(...part.childNodes);
    [...here.querySelectorAll(".scroll, pre")].forEach((box, i) => {
      if (offsets[i]) [box.scrollLeft, box.scrollTop] = offsets[i];
    });
    if (mark) {
      const again = [...here.querySelectorAll("a, button")]
        .find((e) => e.getAttribute("href") === mark || e.dataset.copy === mark);
      if (again) again.focus({ preventScroll: true });
    }
  }
  for (const figure of fresh.querySelectorAll("figure[id]")) charts.update(figure);
  document.title = fresh.title;
}

async function refresh() {
  busy = true;
  fetched = Date.now();
  try {
    const answer = await fetch(location.href, { headers: { accept: "text/html" } });
    if (answer.ok) takeOver(new DOMParser().parseFromString(await answer.text(), "text/html"));
  } catch { show("lost", "no connection"); }
  busy = false;
}

function changed() {
  clearTimeout(due);
  due = setTimeout(() => (busy ? changed() : refresh()), Math.max(0, fetched + REST_MS - Date.now()));
}

// One stream per visible tab: browsers allow a handful per host.
function listen() {
  if (document.hidden) {
    if (source) source.close();
    source = null;
    return;
  }
  if (source) return;
  source = new EventSource("/live");
  source.addEventListener("change", changed);
  source.onopen = () => show("on", "live");
  source.onerror = () => show("lost", "no connection");
}

// ------------------------------------------------------------------ keyboard, theme, copying

addEventListener("keydown", (event) => {
  const search = document.getElementById("search");
  if (event.key === "/" && !event.ctrlKey && !event.metaKey && !event.altKey
      && !document.activeElement.matches("input, select, textarea")) {
    event.preventDefault();
    search.focus();
    search.select();
  } else if (event.key === "Escape" && document.activeElement === search) search.blur();
});

const theme = document.getElementById("theme");
theme.hidden = false;
theme.addEventListener("click", () => {
  const root = document.documentElement;
  const isDark = (root.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  root.dataset.theme = isDark ? "light" : "dark";
  try { localStorage.setItem("theme", root.dataset.theme); } catch { /* for this page only */ }
  charts.drawAll(true);
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => charts.drawAll(true));

document.addEventListener("click", async (event) => {
  const button = event.target.closest(".copy");
  if (!button) return;
  try { await navigator.clipboard.writeText(button.dataset.copy); } catch { select(button); return; }
  button.classList.add("done");
  setTimeout(() => button.classList.remove("done"), 900);
});

// Where the clipboard is out of reach (plain HTTP): show the whole text, selected.
function select(button) {
  const code = button.parentElement.querySelector("code");
  code.textContent = button.dataset.copy;
  getSelection().selectAllChildren(code);
}

show("off", "connecting");
document.addEventListener("visibilitychange", listen);
listen();
