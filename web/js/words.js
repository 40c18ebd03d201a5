// The page's texts in the language that ComfyUI shows, from the pack's locales/<language>/main.json.

import { api } from '../../../scripts/api.js'

let words = {}

/** Fetch the words of a language; without any, texts stay as they are written in these files. */
export async function learn(language) {
  try {
    const all = await (await api.fetchApi('/i18n')).json()
    words = (all[language] ?? all[String(language).split('-')[0]])?.devicebridge ?? {}
  } catch {
    words = {}
  }
}

/** A text in the user's language. values: what stands for "{name}" in it. */
export const t = (text, values = {}) => (words[text] ?? text).replace(/\{(\w+)\}/g, (whole, name) => values[name] ?? whole)

/** How a run or a job is. */
export const stateName = (state) => ({
  running: t('running'), finished: t('finished'), stopped: t('stopped'), failed: t('failed'), crashed: t('crashed'),
  waiting: t('waiting'), starting: t('starting')
})[state] ?? state
