/* Views of documents: text coloured by what memory changes, the timeline of memory tokens, similarity by age. */
"use strict";

const Documents = (() => {
  const { element, format } = Charts;
  const FULL = 2;  // nats of difference that give the full colour

  const MOST = 64;  // points of a line by block, beside block 0

  const mean = (values) => values.reduce((a, b) => a + b, 0) / values.length;
  const difference = (doc, token) => (token ? doc.kept[token - 1] - doc.erased[token - 1] : 0);

  function paint(span, change) {
    const strength = Math.min(1, Math.abs(change) / FULL) ** 0.7;
    if (strength > 0.02) span.style.backgroundColor = `rgba(var(--${change < 0 ? "helped" : "hurt"}), ${(0.85 * strength).toFixed(3)})`;
  }

  /** The text of a document, a span a token; arrow keys walk, and what is known of a token is shown below. */
  class Text {
    constructor(host, doc) {
      this.doc = doc;
      this.facts = element("div", { className: "facts" });
      this.box = element("div", { className: "text", tabIndex: 0 });
      this.box.setAttribute("role", "group");
      this.box.setAttribute("aria-label", `text read by ${doc.name}; arrow keys walk from token to token`);
      this.spans = doc.tokens.map((text, token) => {
        const span = element("span", { textContent: text, dataset: { token } });
        if (token && token % doc.block_size === 0) span.className = "edge";
        paint(span, difference(doc, token));
        return span;
      });
      this.box.append(...this.spans);
      this.box.onmouseover = (event) => event.target.dataset.token && this.choose(Number(event.target.dataset.token));
      this.box.onclick = this.box.onmouseover;
      this.box.onkeydown = (event) => {
        const move = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 20, ArrowUp: -20 }[event.key];
        if (!move) return;
        event.preventDefault();
        this.choose(Math.min(this.spans.length - 1, Math.max(0, (this.token ?? -1) + move)), true);
      };
      const cut = doc.whole ? "" : ` The first ${doc.tokens.length.toLocaleString("en")} tokens of the text.`;
      const [kept, erased] = [doc.kept, doc.erased].map((losses) => Math.exp(mean(losses)));
      const whole = `Perplexity ${format(kept)}; ${format(erased)} when memory is erased, ${format(Math.abs(erased / kept - 1), true)} ${erased < kept ? "lower" : "higher"}.`;
      this.card = element("div", { className: "card" }, element("h3", { textContent: doc.name }),
        element("p", { className: "note", textContent: `${doc.memory}; blocks of ${doc.block_size} tokens.${cut} ${whole}` }), this.box, this.facts);
      host.append(this.card);
      this.choose(0);
    }

    choose(token, scroll) {
      this.spans[this.token]?.classList.remove("chosen");
      this.token = token;
      this.spans[token].classList.add("chosen");
      if (scroll) this.spans[token].scrollIntoView({ block: "nearest" });
      const { doc } = this, block = Math.floor(token / doc.block_size);
      const looks = doc.layers.map((view) => view.shares[token]), share = looks.reduce((a, b) => a + b, 0) / looks.length;
      const facts = [["token", JSON.stringify(doc.tokens[token])], ["number", token], ["block", block]];
      if (token) facts.push(["loss with memory", format(doc.kept[token - 1])], ["without", format(doc.erased[token - 1])], ["difference", format(difference(doc, token))]);
      if (looks.length) facts.push(["attention on memory", format(share, true)]);
      this.facts.replaceChildren(...facts.map(([name, value]) => element("span", {}, `${name} `, element("b", { textContent: value }))));
    }

    /** Outline the tokens that a memory token stands near to. */
    mark(tokens) {
      this.box.querySelectorAll(".source").forEach((span) => span.classList.remove("source"));
      tokens.forEach((token) => this.spans[token]?.classList.add("source"));
    }
  }

  /** Means by block of the loss with memory and without, of many blocks several together; colours by model. */
  function byBlock(docs) {
    const together = (doc) => Math.max(1, Math.ceil((doc.kept.length / doc.block_size - 1) / MOST));
    const blocks = (doc, losses) => {
      const x = [0], y = [mean(losses.slice(0, doc.block_size))], step = together(doc);
      for (let from = 1, all = Math.ceil(losses.length / doc.block_size); from < all; from += step) {
        const to = Math.min(from + step, all);
        x.push((from + to - 1) / 2);
        y.push(mean(losses.slice(from * doc.block_size, to * doc.block_size)));
      }
      return { x, y };
    };
    const several = docs.length > 1, label = (doc, what) => (several ? `${doc.name}, ${what}` : what);
    const lines = docs.flatMap((doc, i) => [["with memory", doc.kept, false], ["memory erased", doc.erased, true]].map(([what, losses, dashed]) => {
      const { x, y } = blocks(doc, losses);
      return { name: label(doc, what), x, y: y.map(Math.exp), dashed, color: i };
    }));
    const gains = docs.map((doc, i) => {
      const { x, y } = blocks(doc, doc.kept), erased = blocks(doc, doc.erased).y;
      return { name: several ? doc.name : "rise", x, y: y.map((loss, at) => Math.exp(erased[at] - loss) - 1), color: i };
    });
    const marks = [{ from: -0.5, to: 0.5, label: "block 0: control" }], widest = Math.max(...docs.map(together));
    const note = widest > 1 ? `Block 0, then means of ${widest} blocks.` : "";
    return [
      { title: "Perplexity by block", x: { label: "block" }, y: { label: "perplexity" }, series: lines, marks, note },
      { title: "How much perplexity rises when memory is erased", x: { label: "block" }, y: { label: "rise", percent: true }, series: gains, marks,
        note: `In block 0 there is nothing to erase: it must be 0. ${note}` },
    ];
  }

  const middle = (place) => (Array.isArray(place) ? (place[0] + place[1]) / 2 : place + 0.5);

  /** What the timeline shows of a document: one layer's block, its memory tokens oldest first. */
  function moment(doc, state) {
    const view = doc.layers.find((one) => one.layer === Number(state.layer)) || doc.layers[0];
    const block = view?.blocks[Math.min(state.block, view.blocks.length) - 1];
    if (!block) return null;
    const columns = block.places.map((_, j) => j).sort((a, b) => middle(block.places[a]) - middle(block.places[b]));
    return { view, block, columns, at: columns.map((j) => middle(block.places[j])) };
  }

  function timeline(doc, state, found) {
    const { block, columns, at } = found, ages = state.axis === "age";
    const xs = ages ? at.map((place) => Math.max(block.seen - place, 0.5)).reverse() : at;
    const grow = xs.map((x, j) => x + j * 1e-9 * block.seen);
    const heads = state.head === "all" ? block.attention.map((_, h) => h) : [Math.min(Number(state.head), block.attention.length - 1)];
    const line = (h) => { const y = columns.map((j) => block.attention[h][j]); return ages ? y.reverse() : y; };
    const chosen = Math.min(state.token, columns.length - 1), place = ages ? columns.length - 1 - chosen : chosen;
    const top = Math.max(...heads.map((h) => line(h)[place]));
    const end = block.seen + doc.block_size;
    return {
      title: `${doc.name}: block ${block.seen / doc.block_size}, layer ${found.view.layer}`, height: 280,
      x: { label: ages ? "age, tokens before the block" : "token of the history", log: ages ? 10 : undefined }, y: { label: "attention", percent: true },
      marks: ages ? [] : [{ from: block.seen, to: end, label: "this block" }],
      note: `${columns.length} memory tokens stand for ${block.seen.toLocaleString("en")} tokens. All together they get ${format(share(block, heads), true)} of the attention.`,
      ticks: edges(block).map((place) => (ages ? Math.max(block.seen - place, 0.5) : place)),
      series: [...heads.map((h) => ({ name: `head ${h}`, x: grow, y: line(h), points: true, color: h })),
        { name: "chosen", x: [grow[place]], y: [top], dots: true, color: 6 }],
    };
  }

  /** Where memory tokens stand: sample points, or both ends of each cell. */
  const edges = (block) => [...new Set(block.places.flat())];

  const share = (block, heads) => heads.reduce((sum, h) => sum + block.attention[h].reduce((a, b) => a + b, 0), 0) / heads.length;

  /** The words nearest to a memory token, each in its context. */
  function nearest(doc, state, found) {
    const { block, columns } = found, chosen = Math.min(state.token, columns.length - 1), column = columns[chosen];
    const place = block.places[column], where = Array.isArray(place) ? `tokens ${format(place[0])} to ${format(place[1])}` : `token ${format(place)}`;
    const items = block.nearest[column].map((token, rank) => {
      const text = (from, to) => doc.tokens.slice(Math.max(from, 0), Math.max(to, 0)).join("").replaceAll("\n", "⏎");
      return element("li", {}, element("code", {}, text(token - 24, token), element("mark", { textContent: text(token, token + 1) || "·" }), text(token + 1, token + 16)),
        ` token ${token}, similarity ${block.similar[column][rank]}`);
    });
    return element("div", { className: "card" }, element("h3", { textContent: `Memory token ${chosen} of ${doc.name}: ${where}` }),
      element("p", { className: "note", textContent: "Tokens of the history whose keys are most similar to it (cosine, the mean key taken away)." }),
      element("ul", { className: "nearest" }, ...items));
  }

  function ages(docs, state) {
    const [layer, part] = state.part.split(" ");
    const series = docs.flatMap((doc, i) => {
      const found = doc.ages.find((one) => String(one.layer) === layer && one.part === part);
      if (!found) return [];
      return Object.entries(found.orders).map(([order, y], k) => ({
        name: `${docs.length > 1 ? `${doc.name}, ` : ""}order ${order}${Number(order) === found.own ? " (this model)" : ""}`,
        x: found.ages, y, color: docs.length > 1 ? i * 4 + k : k, dashed: docs.length > 1 && i === 1,
      }));
    });
    return { title: `Similarity by age: ${part}s of layer ${layer}`, wide: true, x: { label: "age, tokens", log: 10 }, y: { label: "similarity" }, series };
  }

  return { Text, byBlock, moment, timeline, nearest, ages };
})();
