// What the page knows: asked for once, then kept true by the server's messages. Nothing is polled.

import { api } from '../../../scripts/api.js'

const MOST_POINTS = 2000
const STALE_MS = 5000
const DRAWN_EVERY_MS = 1000
const SAVED = 'devicebridge.page'

export const state = {
  runs: [], // summaries, newest first
  jobs: [],
  cards: [],
  details: new Map(), // run -> curves, memory, checkpoints, samples
  working: null, // what a node of this page does that is no run yet: {node, phase, what, step, total}
  error: '',
  isLoaded: false,
  choice: { run: '', compared: [], smoothing: 0.9, prompt: '', ...saved() }
}

const listeners = new Set()
const wanted = new Map() // run -> time of the last question

function saved() {
  try {
    return JSON.parse(localStorage.getItem(SAVED)) ?? {}
  } catch {
    return {}
  }
}

/** Draw something at each change, at most once a second, and not while the page is hidden. */
export function drawOnChange(draw) {
  let timer = 0
  let drawnAt = -Infinity
  const now = () => {
    clearTimeout(timer)
    timer = 0
    drawnAt = performance.now()
    draw()
  }
  const soon = () => {
    if (!timer && !document.hidden) timer = setTimeout(now, Math.max(0, drawnAt + DRAWN_EVERY_MS - performance.now()))
  }
  listeners.add(soon)
  document.addEventListener('visibilitychange', soon)
  const end = () => {
    listeners.delete(soon)
    clearTimeout(timer)
    document.removeEventListener('visibilitychange', soon)
  }
  return { now, soon, end }
}

export function changed() {
  for (const listener of listeners) listener()
}

export function choose(values) {
  Object.assign(state.choice, values)
  try {
    localStorage.setItem(SAVED, JSON.stringify(state.choice))
  } catch {
    // private windows keep nothing
  }
  changed()
}

/** The run that is shown: the one chosen, else one that runs, else the newest. */
export function shownRun() {
  const { runs, choice } = state
  return runs.find((run) => run.run === choice.run) ?? runs.find((run) => run.state === 'running') ?? runs[0]
}

/** Ask for JSON; an error is thrown with what the server said, and with all of its answer as `values`. */
export async function ask(path, body) {
  const options = body && {
    method: 'POST',
    headers: { 'Content-Type': 'application/json' },
    body: JSON.stringify(body)
  }
  const answer = await api.fetchApi(`/devicebridge/${path}`, options || undefined)
  const values = await answer.json().catch(() => ({}))
  if (!answer.ok) throw Object.assign(new Error(values.error ?? `the server answers ${answer.status}`), { values })
  return values
}

/** Send what a button stands for; returns the answer, or undefined where it was refused. */
export async function send(path, body) {
  try {
    const values = await ask(path, body)
    state.error = ''
    await refresh()
    return values
  } catch (error) {
    state.error = error.message
    changed()
  }
}

export const address = (path, values) => api.apiURL(`/devicebridge/${path}?${new URLSearchParams(values)}`)

export async function refresh() {
  try {
    Object.assign(state, await ask('state'), { isLoaded: true })
    for (const run of [...state.details.keys()]) await load(run, true)
  } catch (error) {
    state.error = error.message
  }
  changed()
}

/** Have the details of a run, if it is not known yet. */
export async function load(run, again = false) {
  if (!run || (!again && (state.details.has(run) || Date.now() - (wanted.get(run) ?? 0) < STALE_MS))) return
  wanted.set(run, Date.now())
  try {
    state.details.set(run, await ask(`run?${new URLSearchParams({ run })}`))
    changed()
  } catch {
    state.details.delete(run) // it is gone, as the next message will say
  }
}

/** A message of the server: what is new since the last. */
export function hear(news) {
  if (news.cards) state.cards = news.cards
  if (news.jobs) state.jobs = news.jobs
  if (news.gone) state.runs = state.runs.filter((run) => !news.gone.includes(run.run))
  for (const run of news.runs ?? []) hearRun(run)
  changed()
}

function hearRun(news) {
  const { points, evals, memory, files_changed: filesChanged, is_stale: isStale, ...summary } = news
  const place = state.runs.findIndex((run) => run.run === summary.run)
  if (place < 0) state.runs.unshift(summary)
  else state.runs[place] = summary
  const known = state.details.get(summary.run)
  if (!known) return
  Object.assign(known, summary)
  if (memory) known.memory = memory
  if (points) known.steps = joined(known.steps, points)
  if (evals) known.evals = joined(known.evals, evals)
  const isLong = known.steps.length > MOST_POINTS
  const isDue = Date.now() - (wanted.get(summary.run) ?? 0) > STALE_MS
  // a picture is there a moment before the event that names its prompt
  const isPartial = !known.blocks.length || known.samples.some((sample) => !sample.prompt)
  if (filesChanged || !points || ((isStale || isLong || isPartial) && isDue)) load(summary.run, true)
}

/** A resumed run does its last steps again: what is new takes the place of what was known. */
function joined(known, added) {
  if (!added.length) return known
  const first = added[0][0]
  return [...known.filter((point) => point[0] < first), ...added]
}

/** An event of a node that this page has started. */
export function hearEvent({ node, kind, step, total, values }) {
  if (kind === 'phase') state.working = { node, phase: values.name }
  else if (kind === 'progress') state.working = { ...state.working, node, what: values.what, step, total }
  else return
  changed()
}

function rest() {
  if (!state.working) return
  state.working = null
  changed()
}

export function listen() {
  api.addEventListener('devicebridge.page', ({ detail }) => hear(detail))
  api.addEventListener('devicebridge.event', ({ detail }) => hearEvent(detail))
  for (const name of ['executing', 'execution_success', 'execution_error', 'execution_interrupted', 'reconnected']) api.addEventListener(name, rest)
  api.addEventListener('reconnected', refresh)
  refresh()
}
