/* The memory microscope: state in the address, controls, and the views that follow them. */
"use strict";

(() => {
  const data = Charts.data(), $ = (id) => document.getElementById(id);
  const DEFAULTS = { source: "5 sine waves", order: 32, points: 32, sampling: "exponential", length: 1024, smooth: 1, words: "The memory keeps what it can of this text.",
    show: 0, beside: -1, block: 1e9, layer: -1, head: "all", axis: "token", token: 0, part: "", theme: "" };
  const SAMPLINGS = { uniform: "uniform: even", exponential: "exponential: near now", midpoints: "midpoints, even",
    uniform_cells: "even cells, averaged", geometric_cells: "cells growing with age" };
  const state = { ...DEFAULTS };
  let subjects = data.subjects, texts = [];
  const drawn = { signal: [], document: [], timeline: [], age: [] };

  const chosen = () => [subjects[state.show], subjects[state.beside]].filter((one, i) => one && (i === 0 || state.beside !== state.show));
  const documents = () => chosen().filter((one) => one.kind === "document");
  const sources = () => Signals.sources(state.source, chosen());

  // -- the address --------------------------------------------------------------------------------------------------

  function read() {
    const found = new URLSearchParams(location.hash.slice(1));
    for (const [name, value] of Object.entries(DEFAULTS)) {
      const told = found.get(name), number = Number(told);
      state[name] = told === null ? value : typeof value === "number" ? (Number.isFinite(number) ? number : value) : told;
    }
    limit();
  }

  function write() {
    const told = new URLSearchParams();
    for (const [name, value] of Object.entries(state)) if (value !== DEFAULTS[name] && String(value).length < 2000) told.set(name, value);
    history.replaceState(null, "", `#${told}`);
  }

  const between = (value, least, most) => Math.min(most, Math.max(least, Math.round(value)));

  /** Keep what came from an address within what there is. */
  function limit() {
    state.show = between(state.show, 0, Math.max(subjects.length - 1, 0));
    state.beside = between(state.beside, -1, subjects.length - 1);
    if (!Signals.names(chosen()).includes(state.source)) state.source = DEFAULTS.source;
    $("order").max = Signals.highest(sources());
    if (!(state.sampling in Hippo.samplings)) state.sampling = DEFAULTS.sampling;
    for (const name of ["order", "points", "length", "smooth"]) state[name] = between(state[name], Number($(name).min), Number($(name).max));
    const [doc] = documents();
    if (!doc) return;
    const layers = doc.layers.map((view) => view.layer);
    if (!layers.includes(state.layer)) state.layer = layers[0] ?? -1;
    const found = doc.layers.find((view) => view.layer === state.layer), blocks = found?.blocks.length || 1;
    state.block = between(state.block, 1, blocks);
    state.token = between(state.token, 0, Math.max((found?.blocks[state.block - 1]?.places.length || 1) - 1, 0));
    const parts = doc.ages.map((one) => `${one.layer} ${one.part}`);
    if (!parts.includes(state.part)) state.part = parts[0] || "";
    const heads = found?.blocks[0]?.attention.length || 0;
    if (state.head !== "all" && !(Number(state.head) < heads)) state.head = "all";
    if (!["token", "age"].includes(state.axis)) state.axis = "token";
  }

  // -- controls -----------------------------------------------------------------------------------------------------

  function fill(id, entries) {
    $(id).replaceChildren(...entries.map(([value, label]) => Charts.element("option", { value, textContent: label })));
    $(id).value = state[id];
  }

  function controls() {
    const [doc] = documents(), view = doc?.layers.find((one) => one.layer === state.layer);
    fill("source", Signals.names(chosen()).map((name) => [name, name]));
    fill("sampling", data.samplings.map((name) => [name, SAMPLINGS[name] || name]));
    fill("show", subjects.map((one, i) => [i, one.name]));
    fill("beside", [[-1, "nothing"], ...subjects.map((one, i) => [i, one.name])]);
    fill("layer", (doc?.layers || []).map((one) => [one.layer, `layer ${one.layer}`]));
    fill("head", [["all", "every head"], ...(view?.blocks[0]?.attention || []).map((_, h) => [h, `head ${h}`])]);
    fill("axis", [["token", "token of the history"], ["age", "age, logarithmic"]]);
    fill("part", (doc?.ages || []).map((one) => [`${one.layer} ${one.part}`, `layer ${one.layer}, ${one.part}s`]));
    $("block").max = view?.blocks.length || 1;
    $("token").max = Math.max((view?.blocks[state.block - 1]?.places.length || 1) - 1, 0);
    for (const id of ["order", "points", "length", "smooth", "block", "token"]) { $(id).value = state[id]; $(`${id}-value`).textContent = state[id].toLocaleString("en"); }
    if ($("words").value !== state.words) $("words").value = state.words;
    $("words-label").hidden = state.source !== Signals.YOURS;
    $("compare").hidden = subjects.length < 2;
    $("live").hidden = !data.live;
    for (const node of document.querySelectorAll(".documents")) node.hidden = !doc;
    const [source] = sources();
    $("length").disabled = Boolean(source) || state.source === Signals.YOURS;
    $("smooth").disabled = Boolean(source?.state);
    $("about").replaceChildren(...chosen().filter((one) => one.kind === "memory").map((one) => Charts.element("p", { className: "note", textContent: about(one) })));
  }

  function about(file) {
    const parts = file.parts.length ? ` Texts: ${file.parts.map(([name, tokens]) => `${name} (${tokens.toLocaleString("en")})`).join(", ")}.` : "";
    return `${file.name}: ${file.tokens.toLocaleString("en")} tokens in memory, ${file.open} in the open block; ${file.memory}${file.model ? `; made by ${file.model}` : ""}.${parts}`;
  }

  // -- views --------------------------------------------------------------------------------------------------------

  /** Put the specs into the charts of a view, making or removing charts where their number changes. */
  function draw(view, host, specs) {
    specs.forEach((spec, i) => (drawn[view][i] ? drawn[view][i].update(spec) : drawn[view].push(new Charts.Chart(host, spec))));
    drawn[view].splice(specs.length).forEach((chart) => chart.remove());
  }

  /** A number above the charts, one for each source; absent where none has it. */
  function figure(id, values, percent) {
    const known = values.filter((value) => value !== undefined);
    $(id).textContent = known.map((value) => Charts.format(value, percent)).join(" | ");
    $(id).dataset.value = known.join(" ");
    $(id).parentElement.hidden = !known.length;
  }

  function signal() {
    const all = sources().map((source) => Signals.compute(state, source));
    figure("mse", all.map((found) => found.mse));
    figure("share", all.map((found) => (found.variance ? 1 - found.mse / found.variance : undefined)), true);
    figure("ratio", all.map((found) => found.tokens / found.coefficients.length));
    figure("newest", all.map((found) => Math.min(...found.at.map((place) => found.tokens - place))));
    draw("signal", $("signal-charts"), Signals.charts(all, state));
    return all;
  }

  function documentViews() {
    const docs = documents();
    texts = [];
    $("texts").replaceChildren();
    for (const doc of docs) texts.push(new Documents.Text($("texts"), doc));
    draw("document", $("document-charts"), docs.length ? Documents.byBlock(docs) : []);
  }

  function timeline() {
    const pairs = documents().map((doc) => [doc, Documents.moment(doc, state)]);
    const seen = pairs.filter(([, found]) => found);
    $("timelines").querySelectorAll(":scope > .card:not(.chart)").forEach((node) => node.remove());
    draw("timeline", $("timelines"), seen.map(([doc, found]) => Documents.timeline(doc, state, found)));
    drawn.timeline.forEach((chart, i) => { chart.plot.onclick = () => pick(chart, seen[i][1]); });
    $("timelines").append(...seen.map(([doc, found]) => Documents.nearest(doc, state, found)));
    if (documents().length && !seen.length)
      $("timelines").append(Charts.element("p", { className: "card", textContent: "No memory tokens to show: the text fits into one block, or this memory is not read as tokens." }));
    texts.forEach((text, i) => { const found = pairs[i]?.[1]; text.mark(found ? found.block.nearest[found.columns[Math.min(state.token, found.columns.length - 1)]] : []); });
  }

  /** The memory token nearest to a click in the timeline. */
  function pick(chart, found) {
    const { left } = chart.u.cursor;
    if (left === null || left < 0) return;
    const x = chart.u.posToVal(left, "x"), place = state.axis === "age" ? found.block.seen - x : x;
    const far = found.at.map((at) => Math.abs(at - place));
    set("token", far.indexOf(Math.min(...far)));
  }

  const age = () => draw("age", $("ages"), documents().length ? [Documents.ages(documents(), state)] : []);
  const VIEWS = { source: [signal], order: [signal], points: [signal], sampling: [signal], length: [signal], smooth: [signal], words: [signal],
    block: [timeline], layer: [timeline], head: [timeline], axis: [timeline], token: [timeline], part: [age] };
  const ALL = [signal, documentViews, timeline, age];

  function refresh(views = ALL) { limit(); controls(); views.forEach((view) => view()); write(); }

  function set(name, value) {
    state[name] = typeof DEFAULTS[name] === "number" ? Number(value) : value;
    refresh(VIEWS[name]);
  }

  for (const name of Object.keys(DEFAULTS)) if ($(name) && name !== "theme") $(name).oninput = (event) => set(name, event.target.value);

  const links = () => [...document.querySelectorAll("nav a")];
  function theme() { state.theme = Charts.theme(Charts.other()); write(); }
  $("theme").onclick = theme;
  document.onkeydown = (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|TEXTAREA|SELECT)$/.test(event.target.tagName)) return;
    if (event.key === "t") theme();
    links().filter((link) => !link.hidden)[Number(event.key) - 1]?.click();
  };
  for (const link of links()) link.onclick = (event) => { event.preventDefault(); document.querySelector(link.getAttribute("href")).scrollIntoView(); };

  // -- a live model -------------------------------------------------------------------------------------------------

  async function send() {
    $("read").disabled = true;
    $("reading").textContent = "reading ...";
    try {
      const answer = await fetch("read", { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify({ text: $("paste").value }) });
      const told = await answer.json();
      if (!answer.ok) throw new Error(told.error);
      subjects = [...told.subjects, ...subjects.filter((one) => one.kind !== "document")];
      $("reading").textContent = "";
      refresh();
    } catch (error) { $("reading").textContent = String(error.message); }
    $("read").disabled = false;
  }
  $("read").onclick = send;

  if (subjects.some((one) => one.kind === "document") || data.live) {
    $("help").before($("signal"));
    document.querySelector("nav a[href='#help']").before(document.querySelector("nav a[href='#signal']"));
  }
  read();
  if (!location.hash && subjects.length > 1) state.beside = 1;
  if (!location.hash && subjects[0]?.kind === "memory" && subjects[0].features.length)
    Object.assign(state, { source: subjects[0].features[0].name, sampling: subjects[0].sampling || state.sampling, points: subjects[0].points || state.points, order: 1e9 });
  Charts.theme(state.theme);
  refresh();
  window.onhashchange = () => { read(); Charts.theme(state.theme); refresh(); };
  matchMedia("(prefers-color-scheme: dark)").onchange = () => { if (!state.theme) Charts.theme(); };
  window.microscope = { state, set, signal, hippo: Hippo };
})();
