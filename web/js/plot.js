// A small line plot as SVG: several curves, smoothed, with a cursor for pointer and keyboard.

import { h, number } from './dom.js'
import { t } from './words.js'

const COLOURS = ['#0072b2', '#d55e00', '#009e73', '#cc79a7', '#e69f00', '#56b4e9']
const LEFT = 46
const BOTTOM = 18
const TOP = 6

export const colourOf = (index) => COLOURS[index % COLOURS.length]

/** Exponential moving average without a start from zero; weight 0 gives the points themselves. */
export function smoothed(points, weight) {
  let sum = 0
  let norm = 0
  return points.map(([x, y]) => {
    sum = weight * sum + (1 - weight) * y
    norm = weight * norm + (1 - weight)
    return [x, sum / norm]
  })
}

/**
 * A plot that can be drawn again and again.
 * label: what it is, for a screen reader. draw(curves): each {name, points, smoothing, marks}.
 */
export function makePlot(label, height = 150) {
  const readout = h('div', { class: 'db-readout', 'aria-live': 'polite' })
  const svg = h('svg', { class: 'db-plot', tabindex: '0', role: 'img', 'aria-label': label, height })
  const element = h('div', { class: 'db-plot-box' }, svg, readout)
  let drawn = { curves: [], scale: null, key: '' }
  let cursor = null
  let width = 240 // told, as asking for it would have the whole page laid out
  new ResizeObserver(([{ contentRect }]) => {
    width = Math.max(120, Math.round(contentRect.width) || 240)
    draw(drawn.curves)
  }).observe(element)

  function draw(curves) {
    const key = JSON.stringify([width, curves.map((c) => [c.name, c.points.length, c.points.at(-1), c.smoothing, c.marks?.length])])
    if (key === drawn.key) return
    const scale = scaleOf(curves, width, height)
    drawn = { curves, scale, key }
    svg.setAttribute('viewBox', `0 0 ${width} ${height}`)
    svg.setAttribute('aria-label', `${label}. ${curves.map(describe).join('. ') || t('no points yet')}`)
    svg.replaceChildren(...(scale ? [...axes(scale), ...curves.flatMap((curve, index) => lines(curve, index, scale))] : []))
    if (cursor != null) point(cursor)
  }

  function point(step) {
    if (!drawn.scale) return
    cursor = Math.min(drawn.scale.right, Math.max(drawn.scale.left, step))
    svg.querySelector('.db-cursor')?.remove()
    const x = drawn.scale.x(cursor)
    svg.append(h('line', { class: 'db-cursor', x1: x, x2: x, y1: TOP, y2: height - BOTTOM }))
    const found = drawn.curves.map((curve) => [curve.name, nearest(curve.points, cursor)]).filter(([, at]) => at)
    readout.textContent = found.map(([name, at]) => `${name} ${at[0]}: ${number(at[1])}`).join('  ')
  }

  svg.addEventListener('pointermove', (event) => {
    const box = svg.getBoundingClientRect()
    if (drawn.scale && box.width) point(drawn.scale.stepAt(((event.clientX - box.left) / box.width) * drawn.scale.width))
  })
  svg.addEventListener('keydown', (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10 }[event.key]
    if (!move || !drawn.scale) return
    event.preventDefault()
    event.stopPropagation() // the canvas moves by arrows, too
    const unit = Math.max(1, (drawn.scale.right - drawn.scale.left) / 100)
    point((cursor ?? drawn.scale.right) + move * unit)
  })
  return { element, draw }
}

function describe({ name, points }) {
  if (!points.length) return `${name}: ${t('no points yet')}`
  const low = points.reduce((best, each) => (each[1] < best[1] ? each : best))
  return `${name}: ${t('{loss} at step {step}, lowest {low} at step {place}', { loss: number(points.at(-1)[1]), step: points.at(-1)[0], low: number(low[1]), place: low[0] })}`
}

function nearest(points, step) {
  let low = 0
  let high = points.length - 1
  while (low < high) {
    const middle = (low + high) >> 1
    if (points[middle][0] < step) low = middle + 1
    else high = middle
  }
  const [before, at] = [points[low - 1], points[low]]
  return before && at && step - before[0] < at[0] - step ? before : at
}

function scaleOf(curves, width, height) {
  const all = curves.flatMap((curve) => [...curve.points, ...(curve.marks ?? [])])
  if (!all.length) return null
  let [left, right, low, high] = [Infinity, -Infinity, Infinity, -Infinity]
  for (const [x, y] of all) {
    left = Math.min(left, x)
    right = Math.max(right, x)
    low = Math.min(low, y)
    high = Math.max(high, y)
  }
  if (right === left) right = left + 1
  if (high === low) [low, high] = [low - Math.abs(low) * 0.05 - 1e-12, high + Math.abs(high) * 0.05 + 1e-12]
  const [inner, tall] = [width - LEFT - 6, height - TOP - BOTTOM]
  return {
    left, right, low, high, width, height,
    x: (value) => LEFT + (inner * (value - left)) / (right - left),
    y: (value) => TOP + tall * (1 - (value - low) / (high - low)),
    stepAt: (x) => left + ((x - LEFT) / inner) * (right - left)
  }
}

/** A number that fits beside an axis, with as many digits as tell it from another that is a step away. */
function brief(value, step) {
  if (value && Math.abs(value) < 0.001) return value.toExponential(1)
  return number(value, Math.min(5, Math.max(3, Math.ceil(Math.log10(Math.abs(value) / step)) + 1)))
}

function axes({ left, right, low, high, width, height, x, y }) {
  const parts = []
  for (const value of [low, (low + high) / 2, high]) {
    parts.push(h('line', { class: 'db-grid', x1: LEFT, x2: width - 6, y1: y(value), y2: y(value) }))
    parts.push(h('text', { x: LEFT - 4, y: y(value) + 4, 'text-anchor': 'end' }, brief(value, (high - low) / 2)))
  }
  for (const [value, anchor] of [[left, 'start'], [right, 'end']]) {
    parts.push(h('text', { x: x(value), y: height - 4, 'text-anchor': anchor }, String(Math.round(value))))
  }
  return parts
}

function lines(curve, index, { x, y }) {
  const colour = curve.colour ?? colourOf(index)
  const path = (points) => points.map(([a, b], at) => `${at ? 'L' : 'M'}${x(a).toFixed(1)} ${y(b).toFixed(1)}`).join('')
  const parts = []
  const weight = curve.smoothing ?? 0
  if (weight) parts.push(h('path', { class: 'db-raw', d: path(curve.points), stroke: colour }))
  parts.push(h('path', { class: 'db-line', d: path(smoothed(curve.points, weight)), stroke: colour }))
  for (const [a, b] of curve.marks ?? []) parts.push(h('circle', { cx: x(a), cy: y(b), r: 3, fill: colour }))
  return parts
}
