// DeviceBridge in ComfyUI's page: a tab of the sidebar, and what nodes show of themselves.

import { api } from '../../scripts/api.js'
import { app } from '../../scripts/app.js'
import { addToNode, hearNode, takeTexts } from './js/nodes.js'
import { renderPanel } from './js/panel.js'
import { listen } from './js/state.js'
import { learn, t } from './js/words.js'

let endPanel = null

app.registerExtension({
  name: 'DeviceBridge',
  async setup() {
    await learn(app.extensionManager.setting.get('Comfy.Locale') ?? 'en')
    const sheet = new URL('./devicebridge.css', import.meta.url).href
    document.head.append(Object.assign(document.createElement('link'), { rel: 'stylesheet', href: sheet }))
    listen()
    api.addEventListener('executed', ({ detail }) => hearNode(app.graph.getNodeById(detail.display_node ?? detail.node), detail.output))
    app.extensionManager.registerSidebarTab({
      id: 'devicebridge',
      icon: 'pi pi-microchip',
      title: 'DeviceBridge',
      label: 'Device\u200bBridge', // which may break there
      tooltip: t('DeviceBridge: cards, trainings, samples'),
      type: 'custom',
      render(element) {
        endPanel?.()
        endPanel = renderPanel(element)
      },
      destroy() {
        endPanel?.()
        endPanel = null
      }
    })
  },
  nodeCreated: addToNode,
  loadedGraphNode: takeTexts
})
