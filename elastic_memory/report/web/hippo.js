/* The mathematics of the memory in closed form, as in hippo.py and sampling.py: phi_n(u) = sqrt(2n+1) P_n(2u-1). */
"use strict";

const Hippo = (() => {
  /** sqrt(2n+1), and the factors of Legendre's recurrence P_{n+1} = up_n z P_n - down_n P_{n-1}: made once. */
  let factors = { root: [] };
  function factorsOf(order) {
    const table = (value) => Float64Array.from({ length: order }, (_, n) => value(n));
    if (factors.root.length < order)
      factors = { root: table((n) => Math.sqrt(2 * n + 1)), up: table((n) => (2 * n + 1) / (n + 1)), down: table((n) => n / (n + 1)) };
    return factors;
  }

  /** phi_0 .. phi_{order-1} at one moment u of the history, 0 its first token and 1 now. */
  function basis(order, u, values = new Float64Array(order)) {
    const z = 2 * u - 1, { root, up, down } = factorsOf(order);
    let below = 0, here = 1;
    for (let n = 0; n < order; n++) {
      values[n] = root[n] * here;
      const above = up[n] * z * here - down[n] * below;
      below = here;
      here = above;
    }
    return values;
  }

  /** Phi_n, the integral of phi_n from 0 to u: (P_{n+1} - P_{n-1}) / (2 sqrt(2n+1)). */
  function integral(order, u, values = new Float64Array(order)) {
    const z = 2 * u - 1, { root, up, down } = factorsOf(order);
    let below = -1, here = 1;
    for (let n = 0; n < order; n++) {
      const above = n ? up[n] * z * here - down[n] * below : z;
      values[n] = (above - below) / (2 * root[n]);
      below = here;
      here = above;
    }
    return values;
  }

  /** The state after a signal: each token is a step of the history, so the edges of the steps are all that counts. */
  function compress(signal, order) {
    const state = new Float64Array(order), area = new Float64Array(order), tokens = signal.length;
    for (let edge = 1; edge <= tokens; edge++) {
      const height = signal[edge - 1] - (edge < tokens ? signal[edge] : 0);
      integral(order, edge / tokens, area);
      for (let n = 0; n < order; n++) state[n] += height * area[n];
    }
    return state;
  }

  const dot = (one, other) => { let sum = 0; for (let n = 0; n < other.length; n++) sum += one[n] * other[n]; return sum; };

  /** The history that a state stands for, at some sample points. */
  function reconstruct(state, points) {
    const row = new Float64Array(state.length);
    return Array.from(points, (u) => dot(basis(state.length, u, row), state));
  }

  /** Means of the reconstruction over cells [left, right]. */
  const average = (state, cells) => cells.map(([left, right]) => {
    const to = integral(state.length, right), from = integral(state.length, left);
    return dot(to.map((value, n) => (value - from[n]) / (right - left)), state);
  });

  const range = (count, value) => Array.from({ length: count }, (_, i) => value(i));
  const cells = (edges) => edges.slice(1).map((right, i) => [edges[i], right]);

  /** The factor g > 1 with 1 + g + ... + g^(count-1) = width, by bisection of its logarithm. */
  function growth(count, width) {
    let low = 0, high = Math.log(width) / (count - 1);
    for (let i = 0; i < 60; i++) {
      const middle = (low + high) / 2;
      if (Math.expm1(count * middle) > width * Math.expm1(middle)) high = middle; else low = middle;
    }
    return Math.exp(high);
  }

  const uniformCells = (points) => cells(range(points + 1, (j) => j / points));

  /** Where to look: sample points, or cells [left, right]. */
  const samplings = {
    uniform: (points) => range(points, (j) => j / points),
    exponential: (points, history) => range(points, (j) => 1 - (history ** (-1 / Math.max(points - 1, 1))) ** (points - 1 - j)),
    midpoints: (points) => range(points, (j) => (j + 0.5) / points),
    uniform_cells: uniformCells,
    geometric_cells: (points, history) => {
      if (points === 1 || history <= points) return uniformCells(points);
      const g = growth(points, history), distance = range(points + 1, (j) => g ** (points - j) - 1);
      return cells(distance.map((far) => 1 - far / distance[0]));
    },
  };

  const middles = (tokens) => range(tokens, (k) => (k + 0.5) / tokens);
  return { basis, integral, compress, reconstruct, average, samplings, middles };
})();
