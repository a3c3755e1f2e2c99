// The server renders everything; on each event the page fetches itself and swaps its content.
const live = document.getElementById("live");
let busy = false, again = false;
async function refresh() {
  if (busy) { again = true; return; }
  busy = true;
  try {
    const text = await (await fetch("/")).text();
    const fresh = new DOMParser().parseFromString(text, "text/html").querySelector("main");
    if (fresh) document.querySelector("main").replaceWith(fresh);
    live.textContent = "live";
  } catch { live.textContent = "no connection"; }
  busy = false;
  if (again) { again = false; refresh(); }
}
const source = new EventSource("/v1/events");
source.addEventListener("status", refresh);
source.onerror = () => { live.textContent = "no connection"; };
