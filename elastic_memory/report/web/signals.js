/* View of a signal: the truth, what the memory gives back, its sample points, the error by age, the basis. */
"use strict";

const Signals = (() => {
  /** Numbers that look random and are the same on every machine (mulberry32, Box-Muller). */
  function noise(length, seed = 42) {
    let state = seed;
    const uniform = () => {
      state = (state + 0x6d2b79f5) | 0;
      let mixed = Math.imul(state ^ (state >>> 15), 1 | state);
      mixed = (mixed + Math.imul(mixed ^ (mixed >>> 7), 61 | mixed)) ^ mixed;
      return ((mixed ^ (mixed >>> 14)) >>> 0) / 2 ** 32;
    };
    return Array.from({ length }, () => Math.sqrt(-2 * Math.log(1 - uniform())) * Math.cos(2 * Math.PI * uniform()));
  }

  const sampled = (value) => (length) => Array.from({ length }, (_, k) => value(k / length));
  const sines = (count) => sampled((t) => {
    let sum = 0;
    for (let f = 1; f <= count; f++) sum += Math.sin(2 * Math.PI * f * t);
    return sum;
  });
  function walk(length) {
    let sum = 0;
    return noise(length, 7).map((step) => (sum += step) / Math.sqrt(length));
  }

  const GENERATED = {
    "1 sine wave": sines(1), "5 sine waves": sines(5), "20 sine waves": sines(20),
    "rising pitch": sampled((t) => Math.sin(60 * t * t * t)),
    "steps": sampled((t) => [0.2, 1, -0.6, 0.4, -1, 0.8, 0][Math.floor(7 * t)]),
    "one spike": (length) => Array.from({ length }, (_, k) => (k === Math.floor(0.7 * length) ? 1 : 0)),
    "random walk": walk, "noise": noise,
  };
  const YOURS = "your text", HIGHEST = 1024;

  /** Float32 numbers that the page holds as text. */
  const unpack = (text) => Array.from(new Float32Array(Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0)).buffer));

  function smoothed(signal, width) {
    let sum = 0;
    return signal.map((value, k) => (sum += value - (k >= width ? signal[k - width] : 0)) / Math.min(width, k + 1));
  }

  /** Everything that can be looked at: generated signals, pasted text, features of documents and of memory files. */
  const names = (subjects) => [...Object.keys(GENERATED), YOURS, ...new Set(subjects.flatMap((one) => one.features.map((feature) => feature.name)))];

  /** What a name stands for in each of the subjects: their features of that name, or one signal that all share. */
  function sources(name, subjects) {
    const found = subjects.flatMap((one) => one.features.filter((feature) => feature.name === name).map((feature) => ({ ...feature, of: one.name, tokens: one.tokens })));
    return found.length ? found : [null];
  }

  /** The highest order a source can be looked at with. */
  const highest = (sources) => Math.min(...sources.map((one) => (one?.state ? unpack(one.state).length : HIGHEST)));

  function truth(state, feature) {
    if (feature) return feature.values ? unpack(feature.values) : null;
    if (state.source === YOURS) return Array.from(state.words, (letter) => letter.codePointAt(0)).map((code) => (code - 96) / 32);
    return GENERATED[state.source](state.length);
  }

  /** The numbers of the view: the signal, the memory's state, what comes back, and where it was looked at. */
  function compute(state, feature) {
    let signal = truth(state, feature);
    if (signal && signal.length === 0) signal = [0];
    if (signal) signal = smoothed(signal, state.smooth);
    const tokens = signal ? signal.length : feature.tokens;
    const coefficients = signal ? Hippo.compress(signal, state.order) : Float64Array.from(unpack(feature.state).slice(0, state.order));
    const shown = Math.min(tokens, 4096), middles = signal ? Hippo.middles(tokens) : Hippo.middles(shown);
    const back = Hippo.reconstruct(coefficients, middles);
    const looked = Hippo.samplings[state.sampling](state.points, tokens), cells = Array.isArray(looked[0]);
    const read = cells ? Hippo.average(coefficients, looked) : Hippo.reconstruct(coefficients, looked);
    const order = looked.map((_, j) => j).sort((a, b) => middle(looked[a]) - middle(looked[b]));
    const at = order.map((j) => middle(looked[j]) * tokens), samples = order.map((j) => read[j]);
    const result = { of: feature?.of, signal, tokens, coefficients, middles, back, looked, cells, at, samples };
    if (signal) {
      const mean = signal.reduce((a, b) => a + b, 0) / tokens;
      result.errors = signal.map((value, k) => value - back[k]);
      result.mse = result.errors.reduce((sum, one) => sum + one * one, 0) / tokens;
      result.variance = signal.reduce((sum, one) => sum + (one - mean) ** 2, 0) / tokens;
    }
    return result;
  }

  const middle = (place) => (Array.isArray(place) ? (place[0] + place[1]) / 2 : place);

  /** One chart of each source, then errors and basis of all. */
  function charts(all, state) {
    const [first] = all, several = all.length > 1;
    const mains = all.map((found) => main(found, several || found.of ? `${found.of}: ${state.source}` : state.source, !several));
    const us = Hippo.middles(400), order = first.coefficients.length, values = us.map((u) => Hippo.basis(order, u));
    const shown = [...new Set([0, 1, 2, 3, order - 1])].filter((n) => n < order);
    const basis = {
      title: "The basis: polynomials that are added up", x: { label: "moment of the history, 0 first token, 1 now" }, y: { label: "value" },
      series: shown.map((n, i) => ({ name: `number ${n}`, x: us, y: values.map((row) => row[n]), color: i })),
    };
    const known = all.filter((found) => found.signal);
    const error = {
      title: "Error by age", x: { label: "age, tokens", log: 10 }, y: { label: "error, absolute", log: 10 },
      note: "The newest tokens stand on the left. Means over neighbouring ages.",
      series: known.map((found, i) => ({ name: several ? found.of : "error", ...aged(found.errors), color: several ? i : 6 })),
    };
    return [...mains, ...(known.length ? [error] : []), basis];
  }

  function main(found, name, wide) {
    const xs = found.middles.map((u) => u * found.tokens);
    return {
      title: `${name}, and what comes back`, wide, height: 300, x: { label: "token" }, y: { label: "value" },
      note: found.cells ? "Each dot is the mean over a cell of the history." : "Each dot is a sample point: a memory token.",
      series: [
        ...(found.signal ? [{ name: "signal", x: xs, y: found.signal, thick: true, color: 4 }] : []),
        { name: "reconstruction", x: xs, y: found.back, color: 0 },
        { name: "sample points", x: unique(found.at), y: found.samples, dots: true, color: 1 },
      ],
    };
  }

  /** Sample points may fall on one place: a chart's x must grow. */
  const unique = (places) => places.map((place, j) => (j && place <= places[j - 1] ? places[j - 1] + 1e-9 * (j + 1) : place));

  function aged(errors) {
    const count = errors.length, x = [], y = [];
    for (let from = 1; from <= count;) {
      const to = Math.min(count, Math.max(from, Math.floor(from * 1.12)));
      let sum = 0;
      for (let age = from; age <= to; age++) sum += errors[count - age] ** 2;
      x.push(Math.sqrt(from * to));
      y.push(Math.max(Math.sqrt(sum / (to - from + 1)), 1e-16));
      from = to + 1;
    }
    return { x, y };
  }

  return { names, sources, highest, compute, charts, YOURS };
})();
