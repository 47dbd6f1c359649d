'use strict'
// Zoom and hover. The marks are the data: x is in nanoseconds, y counts rows. Without a script the page is a picture.
{
  const verbs = { w: 'waits', m: 'multiplies', a: 'adds', s: 'stores or sends' }
  const plots = [...document.querySelectorAll('.timeline svg.rows')].map((svg) => {
    const [, , until, rows] = svg.getAttribute('viewBox').split(' ').map(Number)
    return { svg, until, rows, names: [...svg.children].map((row) => row.querySelector('title').textContent) }
  })
  // The names are told below the picture.
  for (const title of document.querySelectorAll('.timeline svg.rows title')) title.remove()

  // What is shown, in parts of the whole.
  let [left, right, top, bottom] = [0, 1, 0, 1]
  const words = (ns, shown, until) => {
    const [unit, per] = until < 1e7 ? ['us', 1e3] : ['ms', 1e6]
    return `${(ns / per).toFixed(Math.max(0, 2 - Math.floor(Math.log10(Math.max(shown / per, 1e-3)))))} ${unit}`
  }
  function show(...part) {
    const clamp = (x) => Math.min(1, Math.max(0, x))
    ;[left, right, top, bottom] = part.map(clamp)
    for (const { svg, until, rows } of plots) {
      svg.setAttribute('viewBox', [left * until, top * rows, (right - left) * until, (bottom - top) * rows].join(' '))
      for (const tick of svg.parentNode.querySelectorAll('.tick')) {
        tick.textContent = words((left + tick.dataset.at * (right - left)) * until, (right - left) * until, until)
      }
    }
  }

  // The plot under the pointer, and where in it.
  function locate(event) {
    for (const plot of plots) {
      const at = new DOMPoint(event.clientX, event.clientY).matrixTransform(plot.svg.getScreenCTM().inverse())
      const [x, y] = [at.x / plot.until, at.y / plot.rows]
      if (x >= left && x <= right && y >= top && y < bottom) return { plot, x, y }
    }
  }
  function span(row, ns) {
    for (const path of row.querySelectorAll('path')) {
      const numbers = path.getAttribute('d').match(/-?[\d.]+/g).map(Number)
      for (let i = 0, end = 0; i < numbers.length; i += 3) {
        const begin = end + numbers[i]
        end = begin + numbers[i + 2]
        if (ns >= begin && ns < end) return [path.getAttribute('class'), begin, end]
      }
    }
  }

  const readout = document.createElement('p')
  readout.className = 'readout'
  readout.textContent = 'Point at a span for its times; drag over a part to enlarge it.'
  let from
  const mark = document.createElementNS('http://www.w3.org/2000/svg', 'rect')
  mark.setAttribute('fill-opacity', '.25')
  for (const picture of document.querySelectorAll('.timeline figure > svg')) {
    picture.addEventListener('pointerdown', (event) => {
      from = locate(event)
      if (from) picture.setPointerCapture(event.pointerId)
    })
    picture.addEventListener('pointermove', (event) => {
      const at = locate(event)
      if (!at) return
      const { plot, x, y } = at
      if (from && from.plot === plot) {
        const box = { x: Math.min(x, from.x) * plot.until, width: Math.abs(x - from.x) * plot.until, y: top * plot.rows, height: (bottom - top) * plot.rows }
        for (const name in box) mark.setAttribute(name, box[name])
        plot.svg.append(mark)
      }
      const row = Math.floor(y * plot.rows)
      const found = span(plot.svg.children[row], x * plot.until)
      const does = found ? `${verbs[found[0]]} from ${words(found[1], 1e3, plot.until)} to ${words(found[2], 1e3, plot.until)}` : 'does nothing'
      readout.textContent = `rank ${plot.svg.dataset.rank}, ${plot.names[row].split(':')[0]} ${does}`
    })
    picture.addEventListener('pointerup', (event) => {
      const to = locate(event)
      mark.remove()
      if (from && to && from.plot === to.plot && Math.abs(to.x - from.x) > 0.004 * (right - left)) {
        const tall = Math.abs(to.y - from.y) > 0.1 * (bottom - top)
        const [y0, y1] = tall ? [from.y, to.y].sort((a, b) => a - b) : [top, bottom]
        show(Math.min(from.x, to.x), Math.max(from.x, to.x), y0, y1)
      }
      from = undefined
    })
    picture.addEventListener('dblclick', () => show(0, 1, 0, 1))
  }

  const buttons = document.createElement('p')
  buttons.className = 'buttons'
  const middle = () => (left + right) / 2
  const wide = () => right - left
  const actions = {
    'zoom in': () => show(middle() - wide() / 4, middle() + wide() / 4, top, bottom),
    'zoom out': () => show(middle() - wide(), middle() + wide(), top, bottom),
    earlier: () => left > 0 && show(left - Math.min(left, wide() / 2), right - Math.min(left, wide() / 2), top, bottom),
    later: () => right < 1 && show(left + Math.min(1 - right, wide() / 2), right + Math.min(1 - right, wide() / 2), top, bottom),
    whole: () => show(0, 1, 0, 1),
  }
  for (const [name, act] of Object.entries(actions)) {
    const button = document.createElement('button')
    button.type = 'button'
    button.textContent = name
    button.addEventListener('click', act)
    buttons.append(button)
  }
  document.querySelector('.timeline').before(buttons)
  ;[...document.querySelectorAll('.timeline')].pop().after(readout)
}
