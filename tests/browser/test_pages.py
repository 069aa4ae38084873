"""Both pages in headless Chromium: every slider moved, numbers shown against the library's, no error in the console.

Needs the package playwright and a Chromium on the path; skipped where they are not. Screenshots at two widths go to the
folder named by SCREENSHOTS, if it is set.
"""

import csv
import json
import os
import re
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

import elastic_memory as em
from elastic_memory import sampling
from elastic_memory.data import load_tokenizer
from elastic_memory.report import explorer, page
from elastic_memory.report.explorer_server import Server

playwright = pytest.importorskip("playwright.sync_api")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on the path")

ROOT = Path(__file__).parents[2]
BLOCK = 32
EVIL = "</script><script>window.broken = true</script><img src=x onerror='window.broken = true'>"
WIDTHS = (390, 1400)


def tiny(**changes):
    torch.manual_seed(len(changes))
    config = em.MemoryLlamaConfig.preset("tiny", memory="elastic", block_size=BLOCK, memory_points=16, **changes)
    return em.MemoryLlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as driver:
        running = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield running
        running.close()


@pytest.fixture
def visit(browser):
    """Open an address at a width; an error in the console, or a request to the network, is a failure."""
    wrong, contexts = [], []

    def open_page(address, width=1400, scheme="light"):
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        contexts.append(context)
        view = context.new_page()
        view.on("console", lambda told: told.type in ("error", "warning") and wrong.append(told.text))
        view.on("pageerror", lambda error: wrong.append(str(error)))
        view.on("request", lambda it: it.url.startswith(("file:", "data:", "blob:", address)) or wrong.append(it.url))
        view.goto(address)
        view.wait_for_selector(".chart canvas")
        return view

    yield open_page
    for context in contexts:
        context.close()
    assert not wrong


@pytest.fixture(scope="module")
def documents():
    text, tokenizer = f"It was the best of times. {EVIL} " * 3, load_tokenizer("bytes")
    models = {"exponential": tiny(sampling="exponential"), "cells": tiny(sampling="uniform_cells", memory_order=8)}
    found = [explorer.document(model, tokenizer, text, f"{name} {EVIL}", 200) for name, model in models.items()]
    for one in found:
        one["tokens"][5] = EVIL  # other tokenizers have long tokens
    return found


@pytest.fixture(scope="module")
def written(tmp_path_factory, documents):
    """The addresses of a page with nothing, with two documents, with two memory files, and of a report."""
    folder = tmp_path_factory.mktemp("pages")
    files = []
    for name, length in (("one", 100), ("two", 70)):
        cache = em.MemoryCache(tiny(sampling="exponential"))
        cache.read(torch.randint(256, (1, length)))
        files.append(folder / f"{name}.memory.safetensors")
        cache.save(files[-1])
    pages = {
        "signals": explorer.page([]),
        "documents": explorer.page(documents),
        "memories": explorer.page(explorer.memory_files(files)),
        "report": page.page(ROOT / "results", f"Results {EVIL}"),
    }
    for name, text in pages.items():
        (folder / f"{name}.html").write_text(text)
    return {name: (folder / f"{name}.html").as_uri() for name in pages}


def move(view, name, value):
    """Put a slider somewhere, as a hand would."""
    view.eval_on_selector(
        f"#{name}", "(it, value) => { it.value = value; it.dispatchEvent(new Event('input')); }", str(value)
    )


def shown(view, name):
    return [float(one) for one in view.get_attribute(f"#{name}", "data-value").split()]


def check_signal(view):
    """The error shown, and what comes back, are those of the library for the signal that the page looks at."""
    (found,) = view.evaluate(
        "microscope.signal().map(({signal, back, looked, samples}) => "
        "({signal: Array.from(signal), back: Array.from(back), looked, samples}))"
    )
    state = view.evaluate("({...microscope.state})")
    signal = torch.tensor(found["signal"], dtype=torch.float64)
    memory = em.hippo.compress(signal, state["order"])
    middles = (torch.arange(len(signal), dtype=torch.float64) + 0.5) / len(signal)
    back = em.hippo.reconstruct(memory, middles)
    assert found["back"] == pytest.approx(back.tolist(), abs=1e-6)
    assert shown(view, "mse") == pytest.approx([float((back - signal).square().mean())], abs=1e-6, rel=1e-6)
    points = sampling.sample_points(state["sampling"], state["points"], len(signal))
    np.testing.assert_allclose(np.array(found["looked"]), points.numpy(), atol=1e-9)
    if points.ndim == 1:
        expected = sorted(zip(points.tolist(), em.hippo.reconstruct(memory, points).tolist(), strict=True))
        assert found["samples"] == pytest.approx([value for _, value in expected], abs=1e-6)
    else:
        areas = em.hippo.integral(state["order"], points[:, 1]) - em.hippo.integral(state["order"], points[:, 0])
        means = areas @ memory / (points[:, 1] - points[:, 0])
        assert found["samples"] == pytest.approx(means.tolist(), abs=1e-6)
    return state


def test_every_slider_and_every_choice_of_the_signal(visit, written):
    view = visit(written["signals"])
    for name in ("order", "points", "length", "smooth"):
        low, high = (int(view.get_attribute(f"#{name}", end)) for end in ("min", "max"))
        for value in (low, high, low + (high - low) // 128 * 32):
            move(view, name, value)
            state = check_signal(view)
            assert view.inner_text(f"#{name}-value") == f"{state[name]:,}"
    for name in ("source", "sampling"):
        for value in view.eval_on_selector_all(f"#{name} option", "all => all.map((one) => one.value)"):
            view.select_option(f"#{name}", value)
            assert check_signal(view)[name] == value
    view.select_option("#source", "your text")
    view.fill("#words", "naïve 漢字 " * 20)
    check_signal(view)
    view.select_option("#source", "1 sine wave")
    move(view, "length", 1024)
    move(view, "smooth", 1)
    move(view, "order", 32)
    assert shown(view, "mse") == pytest.approx([5.0205e-10], rel=1e-3), "the row of the paper's table"


def test_the_basis(visit, written):
    view = visit(written["signals"])
    points = [0.0, 1e-4, 0.3, 0.5, 0.99, 1.0]
    for order in (1, 2, 33, 512):
        for name, exact in (("basis", em.hippo.basis), ("integral", em.hippo.integral)):
            values = view.evaluate(
                f"([order, points]) => points.map((u) => Array.from(microscope.hippo.{name}(order, u)))",
                [order, points],
            )
            np.testing.assert_allclose(np.array(values), exact(order, points).numpy(), atol=1e-6)


def test_samplings(visit, written):
    view = visit(written["signals"])
    for name in sampling.SAMPLINGS:
        for points, history in ((1, 1), (1, 64), (7, 5), (64, 64), (64, 100_000), (512, 4096)):
            found = view.evaluate(
                "([name, points, history]) => microscope.hippo.samplings[name](points, history)",
                [name, points, history],
            )
            np.testing.assert_allclose(
                np.array(found), sampling.sample_points(name, points, history).numpy(), atol=1e-9
            )


def test_the_address_holds_the_state(visit, written):
    view = visit(written["signals"])
    for name, value in (("order", 77), ("points", 9), ("length", 640), ("smooth", 3)):
        move(view, name, value)
    view.select_option("#sampling", "geometric_cells")
    view.select_option("#source", "noise")
    view.click("#theme")
    again = visit(view.url)
    for what in ("({...microscope.state})", "document.getElementById('mse').textContent"):
        assert again.evaluate(what) == view.evaluate(what)
    assert again.get_attribute("html", "data-theme") == "dark"
    odd = visit(
        written["signals"] + "#order=1e99&points=-3&length=x&sampling=%3Cb%3E&source=__proto__&show=7&block=NaN"
    )
    check_signal(odd)


def test_pictures_and_numbers_are_saved(visit, written, tmp_path):
    view = visit(written["signals"])
    with view.expect_download() as picture:
        view.click(".chart button:text('PNG')")
    assert Path(picture.value.path()).read_bytes().startswith(b"\x89PNG")
    with view.expect_download() as numbers:
        view.click(".chart button:text('CSV')")
    rows = list(csv.DictReader(Path(numbers.value.path()).read_text().splitlines()))
    (found,) = view.evaluate("microscope.signal().map((one) => Array.from(one.back))")
    assert [float(row["reconstruction"]) for row in rows if row["reconstruction"]] == pytest.approx(found)


def test_documents(visit, written, documents):
    view = visit(written["documents"])
    assert view.evaluate("window.broken") is None, "text became a script"
    first, second = view.query_selector_all(".text")
    assert first.inner_text() == second.inner_text() == "".join(documents[0]["tokens"])
    first.focus()
    for _ in range(70):
        view.keyboard.press("ArrowRight")
    facts = view.query_selector_all(".facts")[0].inner_text()
    kept, erased = documents[0]["kept"][69], documents[0]["erased"][69]
    assert f"loss with memory {kept:.4g}" in facts and f"without {erased:.4g}" in facts and "block 2" in facts
    losses = [np.mean(documents[0][name][:BLOCK]) for name in ("kept", "erased")]
    assert losses[0] == pytest.approx(losses[1], abs=1e-4), "block 0 is the control"
    view.hover(".text span[data-token='40']")
    assert "number 40" in view.query_selector_all(".facts")[0].inner_text()


def test_many_blocks_are_drawn_as_means(visit, tmp_path, documents):
    rng, tokens = np.random.default_rng(0), 151 * BLOCK
    kept, erased = rng.random((2, tokens - 1)).round(4)
    long = {**documents[0], "tokens": ["a"] * tokens, "kept": kept.tolist(), "erased": erased.tolist(), "layers": []}
    (tmp_path / "long.html").write_text(explorer.page([long]))
    view = visit((tmp_path / "long.html").as_uri())
    with view.expect_download() as numbers:
        view.click("#document-charts .chart:nth-child(2) button:text('CSV')")
    rows = [list(map(float, row)) for row in csv.reader(Path(numbers.value.path()).read_text().splitlines()[1:])]
    assert len(rows) == 51 and [row[0] for row in rows[:3]] == [0, 2, 5], "block 0, then three together"
    for (_, rise), (first, last) in zip([rows[0], rows[1], rows[-1]], [(0, 1), (1, 4), (148, 151)], strict=True):
        part = slice(first * BLOCK, last * BLOCK)
        assert rise == pytest.approx(np.exp(erased[part].mean() - kept[part].mean()) - 1)
    said = view.inner_text("#texts .note")
    assert f"Perplexity {np.exp(kept.mean()):.4g}; {np.exp(erased.mean()):.4g} when memory is erased" in said


def test_timeline(visit, written, documents):
    view = visit(written["documents"])
    blocks = documents[0]["layers"][0]["blocks"]
    for name in ("block", "token"):
        for value in range(int(view.get_attribute(f"#{name}", "min")), int(view.get_attribute(f"#{name}", "max")) + 1):
            move(view, name, value)
    for name in ("layer", "head", "axis", "part"):
        for value in view.eval_on_selector_all(f"#{name} option", "all => all.map((one) => one.value)"):
            view.select_option(f"#{name}", value)
    view.select_option("#axis", "token")
    view.select_option("#head", "all")
    move(view, "block", len(blocks))
    move(view, "token", 0)
    plot = view.query_selector("#timelines .u-over")
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    view.mouse.click(box["x"] + box["width"] * 0.8, box["y"] + box["height"] / 2)
    chosen = view.evaluate("microscope.state.token")
    assert chosen > 0
    places = sorted(range(16), key=lambda column: blocks[-1]["places"][column])
    nearest = blocks[-1]["nearest"][places[chosen]]
    listed = view.query_selector("#timelines .nearest").inner_text()
    assert [int(token) for token in re.findall(r"token (\d+), similarity", listed)] == nearest
    marked = view.eval_on_selector_all(
        ".text >> nth=0 >> .source", "all => all.map((one) => Number(one.dataset.token))"
    )
    assert sorted(marked) == sorted(nearest)


def test_keys(visit, written):
    view = visit(written["documents"])
    for key, section in (("1", "document"), ("2", "timeline"), ("3", "age"), ("4", "signal")):
        view.keyboard.press(key)
        top = view.evaluate(f"document.getElementById('{section}').getBoundingClientRect().top")
        bottom = view.evaluate("document.documentElement.scrollHeight - scrollY - innerHeight")
        assert abs(top) < 120 or bottom < 2, section
    view.focus("#order")
    view.keyboard.press("ArrowRight")
    assert view.evaluate("microscope.state.order") == 33
    check_signal(view)
    view.focus("#signal-charts .plot")
    view.keyboard.press("Home")
    assert "at token" in view.inner_text("#signal-charts .legend")


def test_memory_files_side_by_side(visit, written):
    view = visit(written["memories"])
    titles = view.eval_on_selector_all("#signal-charts h3", "all => all.map((one) => one.textContent)")
    assert titles[0].startswith("one: layer") and titles[1].startswith("two: layer")
    move(view, "order", 3)
    found = view.evaluate("microscope.signal().map((one) => [Array.from(one.coefficients), Array.from(one.back)])")
    for coefficients, back in found:
        points = (torch.arange(len(back), dtype=torch.float64) + 0.5) / len(back)
        exact = em.hippo.reconstruct(torch.tensor(coefficients, dtype=torch.float64), points)
        assert len(coefficients) == 3 and back == pytest.approx(exact.tolist(), abs=1e-6)


def test_a_live_model_reads_what_is_pasted(visit):
    model, tokenizer = tiny(sampling="exponential"), load_tokenizer("bytes")
    server = Server(explorer.page([], live=True), lambda text: [explorer.document(model, tokenizer, text, "live", 200)])
    thread = threading.Thread(target=server.server.serve_forever)
    thread.start()
    try:
        view = visit(server.address)
        assert not view.is_visible("#document")
        for text in ("Call me Ishmael. " * 6, f"{EVIL} again and again " * 3):
            view.fill("#paste", text)
            view.click("#read")
            view.wait_for_function("text => document.querySelector('.text')?.textContent === text", arg=text[:200])
        assert view.evaluate("window.broken") is None
        view.wait_for_selector("#read:enabled")
    finally:
        server.server.shutdown()
        thread.join()
        server.server.server_close()


def test_the_report_shows_values_on_hover(visit, written):
    view = visit(written["report"])
    assert view.evaluate("window.broken") is None and EVIL in view.title()
    data = json.loads(view.inner_text("#data") or view.text_content("#data"))
    charts = view.query_selector_all(".chart")
    assert len(charts) == sum(map(len, data.values()))
    for chart, spec in zip(charts, (spec for specs in data.values() for spec in specs), strict=True):
        chart.query_selector(".plot").focus()
        view.keyboard.press("Home")
        first = next(one["y"][0] for one in spec["series"] if one["y"][0] is not None)
        values = [one.inner_text() for one in chart.query_selector_all(".legend button b")]
        assert all(values) and values != ["-"] * len(values), (spec["title"], first)
    view.keyboard.press("t")
    assert view.get_attribute("html", "data-theme") == "dark"


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_both_pages_fit_every_screen(visit, written, width, scheme):
    shots = os.environ.get("SCREENSHOTS")
    for name, address in written.items():
        view = visit(address, width, scheme)
        assert view.get_attribute("html", "data-theme") == scheme
        assert view.evaluate("document.documentElement.scrollWidth <= innerWidth"), f"{name} is wider than {width}"
        for box in (chart.bounding_box() for chart in view.query_selector_all(".chart .u-wrap")):
            assert box["x"] >= 0 and box["x"] + box["width"] <= width + 1
        for box in (caption.bounding_box() for caption in view.query_selector_all("caption")):
            assert box["x"] + box["width"] <= width, "a caption that has to be scrolled to be read"
        for grid in view.query_selector_all(".grid:has(> *)"):
            whole, last = grid.bounding_box(), grid.query_selector(":scope > :last-child").bounding_box()
            assert not whole or last["x"] + last["width"] == pytest.approx(whole["x"] + whole["width"], abs=1), "a gap"
        if shots:
            view.screenshot(path=Path(shots) / f"{name}-{width}-{scheme}.png", full_page=True)
