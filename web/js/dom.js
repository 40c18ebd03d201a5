// Elements of the page, made without a framework.

/** An element. attributes: "on..." are listeners, true and false set and leave out. children: nodes and texts. */
export function h(tag, attributes = {}, ...children) {
  const svg = SVG_TAGS.has(tag)
  const element = svg ? document.createElementNS('http://www.w3.org/2000/svg', tag) : document.createElement(tag)
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith('on')) element.addEventListener(name.slice(2), value)
    else if (value === true) element.setAttribute(name, '')
    else if (value !== false && value != null) element.setAttribute(name, value)
  }
  element.append(...children.flat(Infinity).filter((child) => child != null && child !== false))
  return element
}

const SVG_TAGS = new Set(['svg', 'path', 'line', 'text', 'circle', 'g', 'rect'])

/** Fill a place anew if the key of what it shows has changed; the focus stays where it was. */
export function fill(place, key, make) {
  const text = JSON.stringify(key)
  if (place.dataset.key === text) return false
  place.dataset.key = text
  const focused = place.contains(document.activeElement) ? document.activeElement.dataset.focus : undefined
  place.replaceChildren(...[make()].flat(Infinity).filter((child) => child != null && child !== false))
  if (focused) [...place.querySelectorAll('[data-focus]')].find((each) => each.dataset.focus === focused)?.focus()
  return true
}

/** Have what a user has clicked drawn at once; of an event's target, while it is in the page. */
export const now = (event) => event.target.dispatchEvent(new CustomEvent('db-now', { bubbles: true }))

export function button(label, focus, action, attributes = {}) {
  return h('button', {
    type: 'button', 'data-focus': focus, ...attributes,
    onclick: async (event) => {
      now(event)
      await action(event)
      now(event)
    }
  }, label)
}

/** Set a text only if it is another: a screen reader is not told twice. */
export function say(place, text) {
  if (place.textContent !== text) place.textContent = text
}

export function duration(seconds) {
  if (seconds == null) return '–'
  if (seconds < 90) return `${Math.round(seconds)} s`
  const minutes = Math.round(seconds / 60)
  return minutes < 90 ? `${minutes} min` : `${Math.floor(minutes / 60)} h ${String(minutes % 60).padStart(2, '0')} min`
}

export const number = (value, digits = 4) => (value == null ? '–' : Number(value.toPrecision(digits)).toString())
export const gigabytes = (bytes) => (bytes / 1e9).toFixed(bytes < 1e10 ? 2 : 1)
