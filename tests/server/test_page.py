"""The page at /: it loads nothing from elsewhere, and shows a model's text only as text."""

from __future__ import annotations

import base64
import hashlib
import re
from html.parser import HTMLParser

import pytest
from serving import tiny_redrafter
from starlette.testclient import TestClient

from redrafter_mlx.server.app import create_app
from redrafter_mlx.server.hosting import ModelHost
from redrafter_mlx.server.models import Models
from redrafter_mlx.server.options import ServerOptions


class Page(HTMLParser):
    """The elements of a page.

    inline: the text of each script and style
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text
        self.attributes: list[tuple[str, str, str]] = []
        self.inline: dict[str, list[str]] = {"script": [], "style": []}
        self._inside: str | None = None
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        self._inside = tag if tag in self.inline else None

    def handle_endtag(self, tag: str) -> None:  # noqa: ARG002
        self._inside = None

    def handle_data(self, data: str) -> None:
        if self._inside is not None:
            self.inline[self._inside].append(data)


@pytest.fixture(scope="module")
def served() -> tuple[Page, dict[str, str]]:
    """The page of a server whose model is not loaded, and its HTTP headers."""
    app = create_app(Models([ModelHost("tiny", tiny_redrafter)]), ServerOptions())
    answer = TestClient(app, base_url="http://localhost").get("/")
    assert answer.status_code == 200
    return Page(answer.text), dict(answer.headers)


def test_the_page_names_no_other_site(served: tuple[Page, dict[str, str]]) -> None:
    page, _ = served
    assert re.findall(r"(?:[a-z]+:)?//[\w.-]+\.\w+|@import|url\(", page.text) == []
    linked = {value for _, name, value in page.attributes if name in ("src", "href", "action")}
    assert linked == {"data:,"}
    asked = set(re.findall(r'ask\("([^"]+)"', page.text))
    assert asked == {"/health", "/v1/models", "/v1/chat/completions"}


def test_text_never_becomes_html(served: tuple[Page, dict[str, str]]) -> None:
    page, headers = served
    makers = (
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|createContextual|eval"
    )
    assert re.findall(rf"\b(?:{makers})\b|setHTML|new Function", page.text) == []
    assert [name for _, name, _ in page.attributes if name.startswith("on")] == []
    assert "require-trusted-types-for 'script'" in headers["content-security-policy"]


def test_the_policy_allows_the_pages_own_code_and_no_other(
    served: tuple[Page, dict[str, str]],
) -> None:
    page, headers = served
    parts = (part.split() for part in headers["content-security-policy"].split(";"))
    policy = {name: set(sources) for name, *sources in parts}
    assert policy["default-src"] == {"'self'"}
    for tag, texts in page.inline.items():
        digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()) for text in texts]
        assert len(digests) == 1
        assert policy[f"{tag}-src"] == {"'self'", *(f"'sha256-{d.decode()}'" for d in digests)}
    assert [name for _, name, _ in page.attributes if name == "style"] == []


def test_the_script_finds_every_element_that_it_names(served: tuple[Page, dict[str, str]]) -> None:
    page, _ = served
    there = [value for _, name, value in page.attributes if name == "id"]
    (script,) = page.inline["script"]
    named = set(re.findall(r'\$\("(\w+)"\)', script))
    assert named
    assert named <= set(there)
    assert len(there) == len(set(there))
    labels = {value for tag, name, value in page.attributes if (tag, name) == ("label", "for")}
    assert labels <= set(there)
