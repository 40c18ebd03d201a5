// What nodes show of themselves: the loss of a training, and the blocks of a model by card.

import { api } from '../../../scripts/api.js'
import { app } from '../../../scripts/app.js'
import { showFolder } from './dataset.js'
import { fill, h, number } from './dom.js'
import { blocksView } from './memory.js'
import { makePlot } from './plot.js'
import { ask, changed, drawOnChange, load, state } from './state.js'
import { stateName, t } from './words.js'

const TRAINING_NODES = ['DeviceBridgeTrainLora', 'DeviceBridgeTrainLoraSimple']
const SPLIT_NODES = ['DeviceBridgeSplitModel', 'DeviceBridgeLoadDiffusionModelSplit']
// as nodes/choices.py has them
const TEXT_LINKS = ['model', 'unet_name', 'folder', 'images', 'evaluation_folder', 'text_encoders', 'text_encoder_2', 'vae', 'text_device', 'vae_device', 'devices', 'balance']
const TEXT_HEIGHT = 90
const ANSWERED = 'devicebridge_run' // property of a training node: the run that its last answer was of
const names = new Map() // of runs, by what nodes say
const BLOCKS = 'devicebridge_blocks' // property of a node: what its last run has shown

export function addToNode(node) {
  if (!node.comfyClass?.startsWith('DeviceBridge')) return
  keepTextsLow(node)
  foldAdvanced(node)
  takeTexts(node)
  if (TRAINING_NODES.includes(node.comfyClass)) {
    addButton(node, 'plan', () => plan(node)).label = t('Hours and memory')
    addLoss(node)
  }
  if (node.comfyClass === 'DeviceBridgeTrainingDataset') addCaptions(node)
  if (SPLIT_NODES.includes(node.comfyClass)) addBlocks(node)
}

/** Let a node that makes a text be connected to a list of files or devices. */
export function takeTexts(node) {
  if (!node.comfyClass?.startsWith('DeviceBridge')) return
  for (const input of node.inputs ?? []) {
    if (TEXT_LINKS.includes(input.name) && input.type === 'COMBO') input.type = 'COMBO,STRING'
  }
}

/** A field of several lines would take all the height that a node has once shown something in. */
function keepTextsLow(node) {
  for (const widget of node.widgets ?? []) if (widget.type === 'customtext') widget.options.getMaxHeight = () => TEXT_HEIGHT
}

function addCaptions(node) {
  addButton(node, 'captions', () => {
    if (!document.querySelector('.db-panel')) app.extensionManager.command.execute('Workspace.ToggleSidebarTab.devicebridge')
    showFolder(node.widgets.find((widget) => widget.name === 'folder')?.value)
  }).label = t('Captions and buckets')
}

/** What a training will take, before Run: in ComfyUI's queue the node runs alone, and plans in place of training. */
async function plan(node) {
  const { output, workflow } = await app.graphToPrompt()
  // inside a subgraph its name has the subgraph's in front
  const own = Object.keys(output).find((id) => id.split(':').at(-1) === String(node.id) && output[id].class_type === node.comfyClass)
  if (!own) return // it is muted
  const inputs = output[own].inputs
  inputs.plan_only = true
  for (const name of ['stock_clip', 'stock_vae']) delete inputs[name] // no plan needs what they load
  if (node.comfyClass === 'DeviceBridgeTrainLora') {
    output[own].class_type = 'DeviceBridgePlanTraining' // which has sockets of the same names
    inputs.cards = ''
    const source = () => output[inputs.dataset?.[0]]
    while (source()?.class_type === 'DeviceBridgeCacheCaptionsAndLatents') inputs.dataset = source().inputs.dataset
  }
  const needed = {}
  const need = (id) => {
    if (!output[id] || needed[id]) return
    needed[id] = output[id]
    Object.values(output[id].inputs).filter(Array.isArray).forEach(([source]) => need(source))
  }
  need(own)
  try {
    await api.queuePrompt(0, { output: needed, workflow })
  } catch (error) {
    app.extensionManager.toast.add({ severity: 'error', summary: 'DeviceBridge', detail: error.message, life: 6000 })
  }
}

function addButton(node, name, action, options = {}) {
  const widget = node.addWidget('button', name, null, action, { serialize: false, ...options })
  widget.serialize = false // neither in the workflow's file
  return widget
}

/** The canvas shows every advanced widget; here they are behind a button, as nodes made by Vue have one themselves. */
function foldAdvanced(node) {
  const setting = app.extensionManager.setting
  const folded = (node.widgets ?? []).filter((widget) => widget.options?.advanced)
  if (!folded.length || setting.get('Comfy.Node.AlwaysShowAdvancedWidgets')) return
  if (setting.get('Comfy.VueNodes.Enabled')) {
    for (const widget of folded) widget.advanced = true // or a node that shows a text takes their height, too
    return
  }
  const unfold = addButton(node, 'advanced', () => show(!folded[0].hidden), { canvasOnly: true })
  const show = (isFolded) => {
    for (const widget of folded) widget.hidden = isFolded
    unfold.label = isFolded ? t('Show advanced inputs') : t('Hide advanced inputs')
    node.setSize([node.size[0], node.computeSize()[1]])
  }
  show(true)
}

/** A node has run. output: what it shows. */
export function hearNode(node, output) {
  if (TRAINING_NODES.includes(node?.comfyClass) && output?.lora?.[0]) {
    node.properties[ANSWERED] = output.lora[0].subfolder.split('/').at(-1)
    changed()
  }
  if (!node || !output?.blocks || !SPLIT_NODES.includes(node.comfyClass)) return
  node.properties[BLOCKS] = output.blocks
  node.devicebridgeDraw?.()
}

function addWidget(node, name, element, height) {
  const widget = node.addDOMWidget(name, `devicebridge-${name}`, element, {
    serialize: false, hideOnZoom: false, getMinHeight: () => height, getMaxHeight: () => height })
  widget.serialize = false // neither in the workflow's file
  return widget
}

function addLoss(node) {
  const plot = makePlot(t('Loss of this training'), 110)
  const facts = h('div', { class: 'db-node-facts', role: 'status' })
  const blocks = h('div')
  const element = h('div', { class: 'db-node' }, facts, plot.element, blocks)
  addWidget(node, 'loss', element, 206)
  const drawing = drawOnChange(() => {
    const run = runOf(node)
    if (run) load(run.run)
    const details = run && state.details.get(run.run)
    facts.textContent = run ? `${run.run}: ${stateName(run.state)}, ${t('step {step}/{total}, loss {loss}', { ...run, loss: number(run.loss) })}` : t('no run of this name yet')
    plot.draw(details ? [{ name: run.run, points: details.steps, marks: details.evals, smoothing: state.choice.smoothing }] : [])
    fill(blocks, details?.blocks, () => (details?.blocks?.length ? blocksView(details.blocks) : []))
  })
  const removed = node.onRemoved
  node.onRemoved = function (...values) {
    drawing.end()
    return removed?.apply(this, values)
  }
  drawing.soon()
}

/** What the server calls a node's run; '' until it has said so. */
function nameOf(node) {
  const said = (id) => [id, node.widgets?.find((widget) => widget.name === id)?.value ?? '']
  const query = String(new URLSearchParams(['name', 'trigger_word', 'images'].map(said)))
  if (!names.has(query)) {
    names.set(query, '')
    ask(`name?${query}`).then((answer) => names.set(query, answer.name) && changed(), () => names.delete(query))
  }
  return names.get(query)
}

/** Of the runs of the name that the node has, numbered ones included: one under way, else the last answer's or the newest. */
function runOf(node) {
  const name = nameOf(node)
  const own = state.runs.filter((run) => name && (run.run === name || (run.run.startsWith(`${name}_`) && /^\d+$/.test(run.run.slice(name.length + 1)))))
  const running = own.find((run) => run.state === 'running')
  if (running) delete node.properties[ANSWERED] // its end is newer than that answer
  return running ?? own.find((run) => run.run === node.properties[ANSWERED]) ?? own[0]
}

function addBlocks(node) {
  const place = h('div', { class: 'db-node' })
  addWidget(node, 'blocks', place, 52)
  node.devicebridgeDraw = () => {
    const blocks = node.properties[BLOCKS]
    fill(place, blocks ?? null, () => (blocks?.length ? blocksView(blocks) : h('span', { class: 'db-none' }, t('blocks by card: after a run'))))
  }
  const configured = node.onConfigure
  node.onConfigure = function (...values) {
    const result = configured?.apply(this, values)
    node.devicebridgeDraw()
    return result
  }
  node.devicebridgeDraw()
}
