// The sidebar's tab: cards, queue, runs, and of one run curves, samples and checkpoints.

import { app } from '../../../scripts/app.js'
import { datasetPart } from './dataset.js'
import { button, duration, fill, h, now, number, say } from './dom.js'
import { blocksView, cardView, memoryLegend } from './memory.js'
import { colourOf, makePlot } from './plot.js'
import { stateName, t } from './words.js'
import { address, choose, drawOnChange, load, send, shownRun, state } from './state.js'

const MOST_COMPARED = 5
const BADGES = { running: '▶', finished: '✓', stopped: '■', failed: '✕', crashed: '✕' }

/** Draw the tab into an element, for as long as it is there. */
export function renderPanel(root) {
  const place = (name, heading, ...more) => h('section', { class: `db-${name}`, 'aria-label': heading }, h('h3', {}, heading), ...more)
  const parts = {
    error: h('div', { class: 'db-error', role: 'alert' }),
    cards: h('div'), queue: h('div'), runs: h('div'),
    facts: h('div'), buttons: h('div', { class: 'db-buttons' }), blocks: h('div'), samples: h('div'), checkpoints: h('div'),
    status: h('div', { class: 'db-status', role: 'status' }),
    loss: makePlot(t('Loss by step')), rate: makePlot(t('Learning rate by step'), 70)
  }
  const smoothing = h('input', {
    type: 'range', min: 0, max: 0.99, step: 0.01, value: state.choice.smoothing, 'aria-label': t('Smoothing of the loss'),
    oninput: () => choose({ smoothing: Number(smoothing.value) })
  })
  const ofRun = h('div', {},
    place('run', t('Run'), parts.facts, parts.buttons, parts.blocks),
    place('loss', t('Loss'), parts.loss.element, h('label', { class: 'db-smoothing' }, `${t('smoothing')} `, smoothing)),
    place('rate', t('Learning rate'), parts.rate.element),
    place('samples', t('Samples'), parts.samples), place('checkpoints', t('Checkpoints'), parts.checkpoints))
  root.replaceChildren(h('div', { class: 'db-panel' }, parts.error, parts.status,
    place('cards', t('Cards'), parts.cards), place('queue', t('Queue'), parts.queue), place('runs', t('Runs'), parts.runs), datasetPart(), ofRun))

  const drawing = drawOnChange(() => { if (root.isConnected) drawAll(parts, ofRun) })
  root.addEventListener('db-now', drawing.now) // what a user has clicked is seen at once
  // ComfyUI calls this before the element is in the page, and where nothing trains no message would come to draw it later
  const drawWhenShown = (framesLeft) => {
    if (root.isConnected) drawing.now()
    else if (framesLeft) requestAnimationFrame(() => drawWhenShown(framesLeft - 1))
  }
  drawWhenShown(120)
  return () => {
    drawing.end()
    root.removeEventListener('db-now', drawing.now)
  }
}

function drawAll(parts, ofRun) {
  const run = shownRun()
  const details = run && state.details.get(run.run)
  if (run) load(run.run)
  fill(parts.error, state.error, () => state.error && [state.error, button(t('Close'), 'close', () => { state.error = '' })])
  drawCards(parts.cards)
  drawQueue(parts.queue)
  drawRuns(parts.runs, run)
  ofRun.hidden = !run
  if (!run) return
  say(parts.status, `${run.run}: ${stateName(run.state)}`)
  drawFacts(parts, run)
  drawCurves(parts, run)
  fill(parts.blocks, details?.blocks, () => (details?.blocks?.length ? blocksView(details.blocks) : []))
  drawSamples(parts.samples, run, details)
  drawCheckpoints(parts.checkpoints, run, details)
}

// ---- cards and queue

function drawCards(place) {
  const running = state.runs.filter((run) => run.state === 'running')
  const of = (card) => state.details.get(running.find((run) => run.devices.includes(card.name))?.run)
  for (const run of running) load(run.run)
  fill(place, state.cards.map((card) => [card, of(card)?.memory?.[card.name], of(card)?.forecast?.[card.name]]), () => [
    ...state.cards.map((card) => cardView(card, of(card))), memoryLegend()])
}

/** What a node does before there is a run, such as encoding captions; '' once a run of it tells more. */
function workOfNode() {
  const { working } = state
  const node = working && app.graph.getNodeById(working.node)
  if (!node || (node.comfyClass.startsWith('DeviceBridgeTrainLora') && state.runs.some((run) => run.state === 'running'))) return ''
  return `${node.title}: ${phaseOf({ phase: working.phase, progress: working })}`
}

function drawQueue(place) {
  const canFree = state.jobs.some((job) => job.why.includes('ComfyUI holds'))
  const work = workOfNode()
  fill(place, [state.jobs, work], () => [
    work && h('p', { class: 'db-working', role: 'status' }, work),
    state.jobs.length ? h('ol', { class: 'db-list' }, state.jobs.map(queued)) : !work && h('p', { class: 'db-none' }, t('Nothing waits.')),
    canFree && button(t('Free the models of ComfyUI'), 'free', () => send('free', {}))])
}

function queued(job) {
  const act = (what) => () => send('queue', { job: job.id, what })
  const named = (label, what, title) => button(label, `${what} ${job.id}`, act(what), { 'aria-label': `${title}: ${job.run}`, title })
  return h('li', {}, h('strong', {}, job.run), ` ${t('{state}, on {cards}', { state: stateName(job.state), cards: job.devices.join(', ') })}`,
    job.why && h('div', { class: job.state === 'failed' ? 'db-why' : 'db-told' }, job.why),
    job.state === 'starting' ? button(t('Stop'), `stop ${job.id}`, () => send('ask', { run: job.run, what: 'stop' }))
      : h('span', { class: 'db-buttons' }, named('↑', 'earlier', t('earlier')), named('↓', 'later', t('later')), named(t('Remove'), 'remove', t('Remove'))))
}

// ---- runs

function drawRuns(place, shown) {
  const { compared } = state.choice
  fill(place, [state.isLoaded, state.runs.map((run) => [run.run, run.state]), shown?.run, compared], () => state.runs.length
    ? h('ul', { class: 'db-list', role: 'list' }, state.runs.map((run) => runRow(run, shown, compared)))
    : h('p', { class: 'db-none' }, state.isLoaded ? t('No run yet. Open a template of DeviceBridge, and press Run.') : t('Asking …')))
  for (const run of state.runs) {
    const row = place.querySelector(`[data-run="${CSS.escape(run.run)}"] .db-steps`)
    if (row) say(row, run.state === 'running' && run.phase !== 'training' ? phaseOf(run) : `${run.step}/${run.total}`)
  }
}

function runRow(run, shown, compared) {
  const isCompared = compared.includes(run.run)
  const compare = () => {
    const others = compared.filter((name) => name !== run.run)
    choose({ compared: isCompared ? others : [...others, run.run].slice(-MOST_COMPARED) })
  }
  return h('li', { 'data-run': run.run, class: run === shown ? 'db-shown' : '' },
    button(`${BADGES[run.state] ?? ''} ${run.run}`, `show ${run.run}`, () => choose({ run: run.run }),
      { class: 'db-name', 'aria-pressed': String(run === shown), 'aria-label': `${run.run}, ${stateName(run.state)}` }),
    h('span', { class: 'db-steps' }),
    h('label', {}, h('input', { type: 'checkbox', checked: isCompared, 'data-focus': `compare ${run.run}`,
      'aria-label': t('compare {run}', { run: run.run }), onchange: (event) => { compare(); now(event) } }), ` ${t('compare')}`))
}

function phaseOf(run) {
  const { what, step, total } = run.progress ?? {}
  return what ? `${what} ${step}/${total}` : run.phase || t('starting')
}

function drawFacts(parts, run) {
  const names = { Step: t('Step'), Loss: t('Loss'), 'Learning rate': t('Learning rate'), 'Seconds a step': t('Seconds a step'), 'Time left': t('Time left') }
  fill(parts.facts, [run.run, run.state, run.message, run.changes], () => [
    run.message && h('p', { class: 'db-why' }, run.message),
    run.changes?.map(([step, lines]) => h('p', { class: 'db-told' }, t('After step {step}: {what}', { step, what: lines.join('; ') }))),
    run.state === 'crashed' && h('p', { class: 'db-why' }, t('Its process is gone. Resume goes on from the newest checkpoint.')),
    h('progress', { max: run.total || 1, value: run.step, 'aria-label': t('steps of {run}', { run: run.run }) }),
    h('dl', {}, Object.entries(names).flatMap(([name, shown]) => [h('dt', {}, shown), h('dd', { 'data-fact': name })]))])
  const values = [
    `${t('{step} of {total}', run)}${run.phase && run.phase !== 'training' ? `, ${phaseOf(run)}` : ''}`,
    number(run.loss), number(run.learning_rate, 3), number(run.step_s, 3),
    run.state === 'running' ? duration(run.left_s) : '–']
  values.forEach((value, index) => say(parts.facts.querySelectorAll('dd')[index], value))
  Object.assign(parts.facts.querySelector('progress'), { max: run.total || 1, value: run.step })
  const ask = (what) => () => send('ask', { run: run.run, what })
  const queuedHere = state.jobs.find((job) => job.run === run.run) // a resumed run waits, or its process starts
  fill(parts.buttons, [run.run, run.state === 'running', run.can_resume, queuedHere?.state, run.settings], () => run.state === 'running'
    ? [button(t('Stop (saves)'), 'stop', ask('stop')), button(t('Save now'), 'save', ask('save')),
      button(t('Sample now'), 'sample', ask('sample'))]
    : queuedHere ? h('p', { class: 'db-told' }, stateName(queuedHere.state))
    : [run.can_resume && button(t('Resume'), 'resume', () => resume(run)), run.settings?.['train.steps'] && continuing(run)])
}

/** What a run can go on with, and the button for it. */
function continuing(run) {
  const field = (key, label, element) => {
    element.value = run.settings[key]
    element.dataset.focus = key
    return [key, element, h('label', {}, `${label} `, element)]
  }
  const numeric = (key, label) => field(key, label, h('input', { type: 'number', min: 0, step: 'any' }))
  const schedules = ['constant', 'linear', 'cosine'].map((name) => h('option', { value: name }, name))
  const fields = [numeric('train.steps', t('Steps')), numeric('optimizer.learning_rate', t('Learning rate')),
    field('schedule.name', t('Schedule'), h('select', {}, schedules))]
  const given = () => Object.fromEntries(fields.map(([key, { type, value }]) => [key, type === 'number' ? Number(value) : value]))
  return [...fields.map(([, , label]) => label), button(t('Continue with these settings'), 'continue', () => resume(run, given()),
    { title: t('Weights, optimizer and step are kept. Images and captions are read again.') })]
}

/** A run that this ComfyUI did not start as it says now is started by somebody who has seen its folders. */
async function resume(run, settings = {}) {
  const { confirm, paths } = await send('resume', { run: run.run, ...settings }) ?? {}
  const message = t('This ComfyUI did not start {run} as it is now. Resume it only if you know these files and folders:', run)
  if (confirm && await app.extensionManager.dialog.confirm({ title: t('Resume'), message, itemList: paths })) {
    await send('resume', { run: run.run, confirm, ...settings })
  }
}

function drawCurves(parts, run) {
  const names = [run.run, ...state.choice.compared.filter((name) => name !== run.run && state.runs.some((each) => each.run === name))]
  for (const name of names) load(name)
  const curves = names.map((name, index) => [name, state.details.get(name), colourOf(index)]).filter(([, details]) => details)
  parts.loss.draw(curves.map(([name, details, colour]) => ({
    name, colour, points: details.steps, marks: details.evals, smoothing: state.choice.smoothing })))
  parts.rate.draw(curves.map(([name, details, colour]) => ({ name, colour, points: details.steps.map(([step, , rate]) => [step, rate]) })))
}

// ---- samples and checkpoints

function drawSamples(place, run, details) {
  const samples = details?.samples ?? []
  const prompts = [...new Set(samples.map((sample) => sample.prompt || t('prompt {number}', { number: sample.index + 1 })))]
  const chosen = prompts.includes(state.choice.prompt) ? state.choice.prompt : ''
  fill(place, [run.run, chosen, samples], () => samples.length ? [
    prompts.length > 1 && h('select', { 'aria-label': t('prompt'), 'data-focus': 'prompt',
      onchange: (event) => { choose({ prompt: event.target.value }); now(event) } },
      ['', ...prompts].map((prompt) => h('option', { value: prompt, selected: prompt === chosen }, prompt || t('all prompts')))),
    ...prompts.filter((prompt) => !chosen || prompt === chosen).map((prompt) => h('figure', {}, h('figcaption', {}, prompt),
      h('div', { class: 'db-strip', tabindex: '0', role: 'group', 'aria-label': t('pictures of: {prompt}', { prompt }) },
        samples.filter((sample) => (sample.prompt || t('prompt {number}', { number: sample.index + 1 })) === prompt).reverse().map((sample) => picture(run, sample, prompt)))))
  ] : h('p', { class: 'db-none' }, t('No sample pictures.')))
}

function picture(run, sample, prompt) {
  const url = address('sample', { run: run.run, file: sample.file })
  const text = `${t('step {step}', sample)}: ${prompt}`
  return h('a', { href: url, target: '_blank', rel: 'noopener', title: text }, sample.file.endsWith('.mp4')
    ? h('video', { src: url, muted: true, loop: true, preload: 'metadata', 'aria-label': text })
    : h('img', { src: url, alt: text, loading: 'lazy' }), h('span', {}, t('step {step}', sample)))
}

function drawCheckpoints(place, run, details) {
  const found = [...(details?.checkpoints ?? [])].reverse()
  fill(place, [run.run, run.state, found], () => found.length
    ? h('ul', { class: 'db-list', role: 'list' }, found.map((each) => checkpointRow(run, each, found)))
    : h('p', { class: 'db-none' }, t('None is saved yet.')))
}

function checkpointRow(run, { step, is_final: isFinal, lora }, all) {
  const name = isFinal ? t('final LoRA') : t('step {step}', { step })
  const key = `${isFinal ? 'last' : step} ${run.run}`
  const use = async () => {
    const answer = await send('use', { run: run.run, step: isFinal ? null : step })
    if (!answer) return
    app.extensionManager.toast.add({ severity: 'success', summary: 'DeviceBridge', detail: t('Copied to models/loras: {name}', answer), life: 6000 })
    await app.extensionManager.command.execute('Comfy.RefreshNodeDefinitions') // lists of nodes that are there
  }
  const remove = async () => {
    const message = t('Delete the checkpoint of step {step} of {run}? Its LoRA goes with it.', { step, run: run.run })
    if (await app.extensionManager.dialog.confirm({ title: t('Delete checkpoint'), message, type: 'delete' })) {
      await send('delete', { run: run.run, step, confirm: true })
    }
  }
  const isNeeded = run.state === 'running' && all.find((each) => !each.is_final)?.step === step
  return h('li', {}, h('span', {}, name), h('span', { class: 'db-buttons' },
    lora && button(t('Use this one'), `use ${key}`, use, { 'aria-label': t('use the LoRA of {name}', { name }), title: t('Copy it to the LoRAs that nodes offer') }),
    lora && h('a', { href: address('lora', { run: run.run, step: isFinal ? 'last' : step }), download: lora, 'data-focus': `export ${key}`,
      'aria-label': t('export the LoRA of {name}', { name }) }, t('Export')),
    !isFinal && button(t('Delete'), `delete ${key}`, remove, { disabled: isNeeded, 'aria-label': t('delete the checkpoint of {name}', { name }) })))
}
