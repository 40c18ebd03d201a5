// The panel's part on a folder of images: captions, those that are missing first, and how each image is cut.

import { app } from '../../../scripts/app.js'
import { button, fill, h, say } from './dom.js'
import { address, ask, choose, state } from './state.js'
import { t } from './words.js'

const SHOWN_AT_ONCE = 30
const NODE = 'DeviceBridgeTrainingDataset'
const SETTINGS = [
  'resolutions', 'folder_resolutions', 'max_aspect_ratio', 'bucket_step', 'trigger_word', 'caption_template', 'default_caption',
  'regularisation', 'caption_lines', 'shuffle_tags', 'keep_tags', 'tag_dropout', 'tag_variants'
]

const view = { folders: null, folder: '', files: [], shown: SHOWN_AT_ONCE, version: 0, error: '' }
let place = null // what is drawn into, while the panel is there
let looks = 0 // how many have begun

/** The part of the panel; closed, it asks for nothing. */
export function datasetPart() {
  place = h('div')
  const part = h('details', {
    class: 'db-dataset', 'aria-label': t('Dataset: captions and buckets'), open: !!state.choice.isDatasetOpen,
    ontoggle: () => {
      if (part.open !== !!state.choice.isDatasetOpen) choose({ isDatasetOpen: part.open })
      if (part.open) look(state.choice.folder)
    }
  }, h('summary', {}, h('h3', {}, t('Dataset: captions and buckets'))), place)
  return part
}

/** Show a folder, as the button of a node asks. */
export function showFolder(folder) {
  choose({ folder, isDatasetOpen: true })
  const part = document.querySelector('.db-dataset')
  if (!part) return
  if (part.open) look(folder)
  part.open = true
  part.scrollIntoView({ block: 'start' })
}

const nodesOf = () => (app.graph?.nodes ?? []).filter((node) => node.type === NODE)
const valueOf = (node, name) => node?.widgets?.find((widget) => widget.name === name)?.value

/** What the dataset's node in the open workflow says of a folder, as far as it matters here. */
function settingsOf(folder) {
  const node = nodesOf().find((each) => valueOf(each, 'folder') === folder)
  const found = SETTINGS.map((name) => [name, valueOf(node, name)]).filter(([, value]) => value != null && value !== '')
  return Object.fromEntries(found.map(([name, value]) => [name, String(value)]))
}

/** Folder and files change together, and only by the newest look: what an older one finds is another folder's. */
async function look(wanted) {
  const number = ++looks
  const found = { folder: wanted, files: [], shown: SHOWN_AT_ONCE, error: '' }
  try {
    found.folders = (await ask('datasets')).folders
    const known = [wanted, ...nodesOf().map((node) => valueOf(node, 'folder')), ...found.folders]
    found.folder = known.find((folder) => found.folders.includes(folder)) ?? ''
    if (found.folder) found.files = (await ask(`dataset?${new URLSearchParams({ folder: found.folder, ...settingsOf(found.folder) })}`)).files
  } catch (error) {
    found.error = error.message
  }
  if (number !== looks) return
  Object.assign(view, found)
  view.version += 1
  draw()
}

function draw() {
  if (!place) return
  fill(place, [view.version, view.shown], () => [chooser(), view.error && h('p', { class: 'db-why', role: 'alert' }, view.error), summary(), list()])
}

function chooser() {
  if (!view.folders?.length) {
    return [h('p', { class: 'db-none' }, t('No folder with images yet. Put one into ComfyUI’s input folder, such as input/my_images.')), button(t('Look again'), 'look again', () => look(''))]
  }
  const pick = async (event) => {
    choose({ folder: event.target.value })
    await look(event.target.value)
  }
  return h('div', { class: 'db-chooser' },
    h('select', { 'aria-label': t('dataset folder'), 'data-focus': 'folder', onchange: pick },
      view.folders.map((name) => h('option', { value: name, selected: name === view.folder }, name))),
    button(t('Look again'), 'look again', () => look(view.folder)))
}

function summary() {
  if (!view.files.length) return null
  const sizes = new Map()
  for (const bucket of view.files.flatMap((each) => each.buckets)) sizes.set(bucket.join(' × '), (sizes.get(bucket.join(' × ')) ?? 0) + 1)
  return [h('p', { class: 'db-told db-counted' }, counted()),
    h('p', { class: 'db-told' }, `${t('buckets')}: ${[...sizes].sort((a, b) => b[1] - a[1]).map(([size, count]) => `${size} (${count})`).join(', ')}`)]
}

const counted = () => t('{total} images, {missing} without a caption', { total: view.files.length, missing: view.files.filter((each) => !each.caption).length })

function list() {
  const left = view.files.length - view.shown
  return [h('ul', { class: 'db-list db-captions', role: 'list' }, view.files.slice(0, view.shown).map((each) => row(each, view.folder))),
    left > 0 && button(t('Show {count} more', { count: Math.min(left, SHOWN_AT_ONCE) }), 'more', () => {
      view.shown += SHOWN_AT_ONCE
      draw()
    })]
}

function row(each, folder) {
  const told = h('div', { class: 'db-told' })
  const wrong = h('div', { class: 'db-why', 'aria-live': 'polite' }, each.problem)
  const text = h('textarea', { rows: 3, 'aria-label': t('caption of {file}', each), placeholder: t('no caption'), title: t('Enter saves, Shift and Enter begin a new line') })
  text.value = each.caption ?? ''
  const keep = button(t('Save'), `save ${each.file}`, () => save(), { 'aria-label': t('save the caption of {file}', each), disabled: true })
  const item = h('li', { 'data-file': each.file }, picture(each, folder),
    h('div', { class: 'db-caption' }, h('strong', {}, each.file), h('div', { class: 'db-told' }, cut(each)), text, told, wrong, keep))
  const show = () => {
    item.classList.toggle('db-missing', !each.caption)
    keep.disabled = text.value === (each.caption ?? '')
    say(told, each.trained_as !== (each.caption ?? '') ? t('trained as: {caption}', { caption: each.trained_as }) : '')
  }
  const save = async () => {
    try {
      const values = { folder, file: each.file, caption: text.value, was: each.caption }
      Object.assign(each, await ask('caption', { ...settingsOf(folder), ...values }))
      text.value = each.caption
      say(wrong, '')
    } catch (error) {
      const now = error.values?.now // what another has written; a second Save is over that
      if (now) Object.assign(each, now)
      say(wrong, now ? t('The caption was changed meanwhile to: {caption}. Save puts yours in its place.', { caption: now.caption || t('no caption') }) : error.message)
    }
    show()
    const line = place.querySelector('.db-counted')
    if (line) say(line, counted())
  }
  text.addEventListener('input', show)
  text.addEventListener('keydown', async (event) => {
    event.stopPropagation() // the canvas has keys of its own
    if (event.key !== 'Enter' || event.shiftKey || event.isComposing) return
    event.preventDefault()
    if (!keep.disabled) await save()
    item.nextElementSibling?.querySelector('textarea')?.focus()
  })
  show()
  return item
}

const picture = (each, folder) => h('img', {
  src: address('picture', { folder, file: each.file, changed: each.changed }), alt: '', loading: 'lazy', width: 72, height: 72
})

function cut(each) {
  if (!each.size) return ''
  return `${each.is_clip ? `${t('clip')}, ` : ''}${each.size.join(' × ')} → ${each.buckets.map((bucket) => bucket.join(' × ')).join(', ')}`
}
