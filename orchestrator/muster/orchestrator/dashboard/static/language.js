// The language of the charts' numbers: the browser's, or the page's where Intl refuses the browser's.
// Without a locale (LANG=C) Chromium's is "en-US@posix". uPlot hands it to Intl while it loads, and no
// chart would be drawn: so the replacement stands in its place before uPlot looks there.
"use strict";

const language = (() => {
  try {
    return new Intl.NumberFormat(navigator.language).resolvedOptions().locale;
  } catch {
    const { lang } = document.documentElement;
    Object.defineProperty(navigator, "language", { value: lang });
    return lang;
  }
})();
