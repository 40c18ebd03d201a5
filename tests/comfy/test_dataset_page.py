"""The panel's part on a folder of images in a browser, with stand-ins for ComfyUI's modules and its server."""

from collections.abc import Iterator
from typing import Any

import pytest
from devicebridge.tests.comfy.server import ROOT

ADDRESS = "http://page.test"
_API = """
const gates = {} // folder -> what its next answer waits for
window.asked = []
window.written = []
window.hold = (folder) => { gates[folder] = new Promise((resolve) => { window.release = resolve }) }
const rest = { size: null, buckets: [], problem: '', changed: 1 }
const row = (folder) => ({ file: '001.png', caption: null, trained_as: `of ${folder}`, ...rest })
async function answer(url, options) {
  if (url.pathname.endsWith('/datasets')) return { folders: ['a', 'b'] }
  if (url.pathname.endsWith('/caption')) {
    const values = JSON.parse(options.body)
    const now = { ...row(values.folder), caption: window.theirs }
    if (now.caption && now.caption !== values.was) return { error: 'changed', now }
    window.written.push(`${values.folder}/${values.file}: ${values.caption}`)
    return { ...row(values.folder), caption: values.caption }
  }
  const settings = Object.fromEntries(url.searchParams)
  window.asked.push(settings)
  await gates[settings.folder]
  return { files: [row(settings.folder)] }
}
export const api = {
  apiURL: (path) => path,
  fetchApi: async (path, options) => {
    const values = await answer(new URL(path, location.origin), options)
    return Response.json(values, { status: values.error ? 409 : 200 })
  }
}
"""
_APP = """
const sizes = { resolutions: '512', folder_resolutions: '768' }
const values = { folder: 'a', ...sizes, default_caption: 'a dog', trigger_word: '' }
const widgets = Object.entries(values).map(([name, value]) => ({ name, value }))
export const app = { graph: { nodes: [{ type: 'DeviceBridgeTrainingDataset', widgets }] } }
"""
_START = """async () => {
  const { datasetPart } = await import('/extensions/devicebridge/js/dataset.js')
  document.body.append(datasetPart())
  document.querySelector('details').open = true
}"""
_RELEASE = """async () => {
  window.release()
  for (let turn = 0; turn < 20; turn += 1) await new Promise((resolve) => setTimeout(resolve))
}"""


@pytest.fixture
def page(chromium: str) -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    def serve(route: Any) -> None:
        path = route.request.url.removeprefix(ADDRESS).partition("?")[0]
        own = {"/": "<body></body>", "/scripts/api.js": _API, "/scripts/app.js": _APP}
        file = ROOT / "web" / "js" / path.rpartition("/")[2]
        if path not in own and not file.is_file():
            return route.fulfill(status=404)
        kind = "text/html" if path == "/" else "text/javascript"
        return route.fulfill(body=own.get(path) or file.read_text(encoding="utf-8"), content_type=kind)

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page()
        page.route("**/*", serve)
        page.goto(f"{ADDRESS}/")
        page.evaluate(_START)
        page.get_by_text("trained as: of a").wait_for()
        yield page
        browser.close()


def _save(page: Any, text: str) -> str:
    count = page.evaluate("() => window.written.length")
    page.get_by_label("caption of 001.png", exact=True).fill(text)
    page.get_by_label("save the caption of 001.png").click()
    page.wait_for_function(f"() => window.written.length > {count}")
    return page.evaluate("() => window.written.at(-1)")


def test_a_caption_goes_to_the_folder_whose_image_it_was_written_for(page: Any) -> None:
    chooser = page.get_by_label("dataset folder")
    page.evaluate("() => window.hold('b')")
    chooser.select_option("b")
    page.wait_for_function("() => window.asked.some((each) => each.folder === 'b')")
    assert _save(page, "while b loads") == "a/001.png: while b loads"
    assert "folder=a&" in page.locator(".db-captions img").get_attribute("src")
    chooser.select_option("a")
    page.get_by_text("trained as: of a").wait_for()
    page.evaluate(_RELEASE)
    assert page.get_by_text("trained as: of a").count() == 1, "the answer for b comes too late to be shown"
    assert chooser.input_value() == "a"
    assert _save(page, "after b came") == "a/001.png: after b came"
    chooser.select_option("b")
    page.get_by_text("trained as: of b").wait_for()
    assert _save(page, "of b") == "b/001.png: of b"


def test_the_settings_of_a_folder_are_sent_as_its_node_says_them(page: Any) -> None:
    settings = {"resolutions": "512", "folder_resolutions": "768", "default_caption": "a dog"}
    assert page.evaluate("() => window.asked[0]") == {"folder": "a", **settings}


def test_a_caption_of_another_page_is_shown_and_written_over_only_by_a_second_save(page: Any) -> None:
    page.evaluate("() => { window.theirs = 'of another page' }")
    text, save = (page.get_by_label(f"{what}caption of 001.png", exact=True) for what in ("", "save the "))
    text.fill("mine")
    save.click()
    page.locator(".db-why").get_by_text("of another page").wait_for()
    assert text.input_value() == "mine" and page.evaluate("() => window.written") == []
    save.click()
    page.wait_for_function("() => window.written.length > 0")
    assert page.evaluate("() => window.written") == ["a/001.png: mine"]
