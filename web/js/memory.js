// Bars of a card's memory (forecast beside measured), and of a model's blocks over cards.

import { colourOf } from './plot.js'
import { gigabytes, h } from './dom.js'
import { t } from './words.js'

const PARTS = {
  weights: 'var(--db-weights)',
  LoRA: 'var(--db-lora)',
  activations: 'var(--db-activations)',
  reserve: 'var(--db-reserve)',
  others: 'var(--db-others)',
  free: 'transparent'
}

/** Bytes by what they are for, as planned. parts: of the event "forecast". */
function forecastOf(parts, total) {
  if (!parts) return null
  const sum = (...names) => names.reduce((all, name) => all + (parts[name] ?? 0), 0)
  const found = {
    weights: sum('weights'),
    LoRA: sum('lora', 'gradients', 'optimizer'),
    activations: sum('checkpoints', 'kept', 'moving'),
    reserve: sum('other')
  }
  const used = Object.values(found).reduce((all, each) => all + each, 0)
  return { ...found, free: Math.max(0, (total ?? used) - used) }
}

/** The same as measured: memory is what the training told of itself in GB, card what the driver tells of all. */
function measuredOf(memory, card) {
  if (!memory && card?.used == null) return null
  const { allocated = 0, peak = 0, reserved = 0 } = memory ?? {}
  const own = Math.max(reserved, peak) * 1e9
  const found = memory
    ? { weights: allocated * 1e9, activations: (peak - allocated) * 1e9, reserve: own - peak * 1e9 }
    : { reserve: card.own ?? 0 }
  const used = Object.values(found).reduce((all, each) => all + each, 0)
  const others = card?.used == null ? 0 : Math.max(0, card.used - used)
  return { ...found, others, free: card?.total == null ? 0 : Math.max(0, card.total - used - others) }
}

const partNames = () => ({
  weights: t('weights'), LoRA: t('LoRA and optimizer'), activations: t('activations'), reserve: t('reserved'), others: t('other programs'), free: t('free')
})

function bar(title, parts, names = partNames()) {
  const total = Object.values(parts).reduce((all, each) => all + each, 0) || 1
  const shown = Object.entries(parts).filter(([, size]) => size > 0)
  const text = `${title}: ${shown.map(([name, size]) => `${names[name]} ${gigabytes(size)} GB`).join(', ')}`
  const segments = shown.map(([name, size]) =>
    h('span', { class: `db-part db-${name}`, style: `width:${(100 * size) / total}%;background:${PARTS[name]}` }))
  return h('div', { class: 'db-bar-row' }, h('span', { class: 'db-bar-title' }, title),
    h('div', { class: 'db-bar', role: 'img', 'aria-label': text, title: text }, ...segments))
}

/** A card: its name, how busy and hot it is, and its bars. run: details of what trains there, or undefined. */
export function cardView(card, run) {
  const forecast = forecastOf(run?.forecast?.[card.name]?.parts, card.total)
  const measured = measuredOf(run?.memory?.[card.name], card)
  // of weights and LoRA only the sum is measured
  const names = run?.memory?.[card.name] ? { ...partNames(), weights: t('weights and LoRA') } : partNames()
  const busy = { percent: card.utilisation }
  const told = [
    card.utilisation != null && (card.name === 'host' ? t('CPU {percent} % busy', busy) : t('{percent} % busy', busy)),
    card.temperature != null && `${card.temperature} °C`,
    card.used != null && card.total != null && t('{used} of {total} GB in use', { used: gigabytes(card.used), total: gigabytes(card.total) })
  ].filter(Boolean)
  return h('div', { class: 'db-card', 'data-card': card.name },
    h('div', { class: 'db-card-name' }, card.name === 'host' ? h('strong', {}, t('host memory'))
      : [h('strong', {}, card.name), ` ${card.title === card.name ? '' : card.title}`]),
    h('div', { class: 'db-told' }, told.join(', ') || t('the driver tells nothing of it')),
    forecast && bar(t('forecast'), forecast), measured && bar(t('measured'), measured, names))
}

/** What a model's blocks look like over cards: one field per block. blocks: [[card, number], ...] in their order. */
export function blocksView(blocks) {
  const cards = [...new Set(blocks.map(([card]) => card))]
  const total = blocks.reduce((all, [, count]) => all + count, 0)
  const text = `${t('{total} blocks', { total })}: ${blocks.map(([card, count]) => t('{count} on {card}', { count, card })).join(', ')}`
  const fields = blocks.flatMap(([card, count]) =>
    Array.from({ length: count }, () => h('span', { class: 'db-block', style: `background:${colourOf(cards.indexOf(card))}` })))
  const legend = cards.map((card, index) => {
    const own = blocks.filter(([name]) => name === card).reduce((all, [, count]) => all + count, 0)
    return h('span', { class: 'db-key' }, h('i', { style: `background:${colourOf(index)}` }), `${card}: ${own}`)
  })
  return h('div', { class: 'db-blocks' }, h('div', { class: 'db-block-row', role: 'img', 'aria-label': text, title: text }, fields),
    h('div', { class: 'db-legend', 'aria-hidden': 'true' }, legend))
}

export const memoryLegend = (names = partNames()) => h('div', { class: 'db-legend', 'aria-hidden': 'true' },
  Object.entries(PARTS).map(([name, colour]) => h('span', { class: 'db-key' }, h('i', { style: `background:${colour}` }), names[name])))
