"""A page in one file: styles, scripts and data inside, nothing asked of the network.

Templates escape whatever they are given. Data reaches scripts as JSON that cannot end its own element. A content
security policy names the hash of each style and script, so that a browser runs these and no others.
"""

import base64
import hashlib
import json
from importlib import resources
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

LIBRARY = ("uPlot.iife.min.js", "charts.js")  # of every page, before its own scripts
STYLES = ("uPlot.min.css", "style.css")


def render(template: str, scripts: tuple[str, ...], data: Any, *, live: bool = False, **content: Any) -> str:
    """The page of a template, with `data` for its scripts; a `live` page may talk to the server that it came from."""
    styles, code = [_asset(name) for name in STYLES], [_asset(name) for name in (*LIBRARY, *scripts)]
    policy = {
        "default-src": "'none'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "img-src": "data: blob:",
        "style-src": " ".join(map(_hash, styles)),
        "script-src": " ".join(map(_hash, code)),
        "connect-src": "'self'" if live else "'none'",
    }
    templates = Environment(
        loader=PackageLoader("elastic_memory.report", "web"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page = templates.get_template(template).render(
        policy="; ".join(f"{name} {value}" for name, value in policy.items()),
        styles=[Markup(style) for style in styles],
        scripts=[Markup(script) for script in code],
        licence=_asset("uPlot.LICENSE.txt"),
        data=Markup(embedded_json(data)),
        **content,
    )
    return page.encode(errors="replace").decode()  # JSON may hold halves of characters


def embedded_json(data: Any) -> str:
    """JSON that cannot end its script element: `<`, `>` and `&` are written as JSON escapes."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _asset(name: str) -> str:
    return (resources.files("elastic_memory.report") / "web" / name).read_text(encoding="utf-8").strip()


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
