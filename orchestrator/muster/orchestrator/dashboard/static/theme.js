// Before the first paint: that scripts run, and the theme somebody chose.
document.documentElement.classList.add("js");
try {
  const chosen = localStorage.getItem("theme");
  if (chosen === "dark" || chosen === "light") document.documentElement.dataset.theme = chosen;
} catch { /* storage is off: the system's theme it is */ }
