/* Draws the charts of a report where the page has left room for them. */
"use strict";

(() => {
  const charts = Charts.data();
  Charts.theme();
  for (const host of document.querySelectorAll("[data-charts]"))
    for (const spec of charts[host.dataset.charts]) new Charts.Chart(host, spec);
  const switched = () => Charts.theme(Charts.other());
  document.getElementById("theme").onclick = switched;
  document.onkeydown = (event) => { if (event.key === "t" && !event.ctrlKey && !event.metaKey && !event.altKey) switched(); };
})();
