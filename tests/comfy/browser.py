"""ComfyUI's page in a headless Chromium, for tests and for the docs' pictures."""

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from devicebridge.tests.comfy.server import ROOT, Server
from PIL import Image

SIZE = {"width": 1600, "height": 1000}
READY = "() => !!(window.app?.extensionManager && window.LiteGraph?.registered_node_types?.DeviceBridgeTrainLora)"


@contextmanager
def open_page(chromium: str, server: Server, profile: Path) -> Iterator[Any]:
    """ComfyUI's page, ready; afterwards nothing of this pack has failed in it."""
    from playwright.sync_api import sync_playwright

    faults: list[str] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch_persistent_context(
            str(profile), executable_path=chromium, headless=True,
            args=["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"], viewport=SIZE,
        )  # fmt: skip
        page = browser.pages[0]
        page.set_default_timeout(180_000)  # a machine may be busy
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("console", lambda line: _note(line, faults))
        page.goto(f"http://127.0.0.1:{server.port}/")
        page.wait_for_function(READY)
        try:
            yield page
        finally:
            page.screenshot(path=profile.with_suffix(".png"))  # as it was when something failed
            browser.close()
    assert faults == []


def _note(line: Any, faults: list[str]) -> None:
    if line.type == "error" and "/extensions/devicebridge/" in f"{line.text} {line.location}":
        faults.append(line.text)


def keep_picture(page: Any, name: str, width: int = 1200) -> None:
    """For the docs, with UPDATE_PICTURES=1: what the page shows now, the whole graph in it, in a small file."""
    if not os.environ.get("UPDATE_PICTURES"):
        return
    page.evaluate("() => window.app.extensionManager.command.execute('Comfy.Canvas.FitView')")
    page.wait_for_timeout(700)  # it moves there
    path = ROOT / "docs" / "images" / f"{name}.webp"
    with Image.open(io.BytesIO(page.screenshot())) as picture:
        picture.thumbnail((width, width), Image.Resampling.LANCZOS)
        picture.convert("RGB").save(path, quality=82)


def open_tab(page: Any) -> None:
    """ComfyUI may open the last tab a moment after a reload; a click then closes it, and the next one opens it."""
    from playwright.sync_api import TimeoutError as Late

    panel = page.locator(".db-panel")
    for timeout in (1_000, 10_000, 10_000):
        try:
            panel.wait_for(timeout=timeout)
            return
        except Late:
            page.locator(".devicebridge-tab-button, [data-testid=devicebridge-tab-button]").click()
    panel.wait_for()


FOCUSABLE = ".db-panel :is(a[href], button:enabled, input, select, textarea, summary, svg[tabindex], div[tabindex])"
# Of every text in the panel, how its colour stands out from what is behind it. Colours of any notation become bytes.
CONTRASTS = """() => {
  const context = document.createElement('canvas').getContext('2d', { willReadFrequently: true })
  const bytes = (colour) => {
    context.clearRect(0, 0, 1, 1)
    context.fillStyle = colour
    context.fillRect(0, 0, 1, 1)
    return [...context.getImageData(0, 0, 1, 1).data].map((each) => each / 255)
  }
  const over = (top, below) => [0, 1, 2].map((part) => top[part] * top[3] + below[part] * (1 - top[3]))
  const behind = (element) => {
    if (!element) return [1, 1, 1]
    const own = bytes(getComputedStyle(element).backgroundColor)
    return own[3] === 1 ? own.slice(0, 3) : over(own, behind(element.parentElement))
  }
  const light = (colour) => {
    const [r, g, b] = colour.map((part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4))
    return 0.2126 * r + 0.7152 * g + 0.0722 * b
  }
  const found = []
  for (const element of document.querySelectorAll('.db-panel *')) {
    const texts = [...element.childNodes].filter((node) => node.nodeType === 3).map((node) => node.textContent)
    const text = texts.join('').trim()
    const style = getComputedStyle(element)
    if (!text || !element.checkVisibility() || element.disabled || element.closest('.db-status')) continue
    const below = behind(element)
    const colour = over(bytes(element instanceof SVGElement ? style.fill : style.color), below)
    const [low, high] = [light(colour), light(below)].sort((a, b) => a - b)
    found.push([text.slice(0, 40), Math.round(((high + 0.05) / (low + 0.05)) * 100) / 100])
  }
  return found
}"""
