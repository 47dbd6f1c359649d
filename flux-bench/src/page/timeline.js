'use strict'
// Zoom and hover. The marks are the data: x is in nanoseconds, y counts rows.
{
  const verbs = { w: 'waits', m: 'multiplies', a: 'adds', s: 'stores or sends' }
  const plots = [...document.querySelectorAll('.timeline svg.rows')].map((svg) => {
    const [, , until, rows] = svg.getAttribute('viewBox').split(' ').map(Number)
    const names = [...svg.children].map((row) => row.querySelector('title').textContent)
    return { svg, until, rows, names }
  })
  // The names are told below the picture.
  for (const title of document.querySelectorAll('.timeline svg.rows title')) title.remove()

  // What is shown, in parts of the whole.
  let [left, right, top, bottom] = [0, 1, 0, 1]
  function words(ns, shown, until) {
    const [unit, per] = until < 1e7 ? ['us', 1e3] : ['ms', 1e6]
    const digits = Math.max(0, 2 - Math.floor(Math.log10(Math.max(shown / per, 1e-3))))
    return `${(ns / per).toFixed(digits)} ${unit}`
  }
  function show(...part) {
    ;[left, right, top, bottom] = part.map((x) => Math.min(1, Math.max(0, x)))
    const [wide, tall] = [right - left, bottom - top]
    for (const { svg, until, rows } of plots) {
      svg.setAttribute('viewBox', `${left * until} ${top * rows} ${wide * until} ${tall * rows}`)
      for (const tick of svg.parentNode.querySelectorAll('.tick')) {
        tick.textContent = words((left + tick.dataset.at * wide) * until, wide * until, until)
      }
    }
  }

  // The plot under the pointer, and where in it.
  function locate({ clientX, clientY }) {
    for (const plot of plots) {
      const inverse = plot.svg.getScreenCTM().inverse()
      const at = new DOMPoint(clientX, clientY).matrixTransform(inverse)
      const [x, y] = [at.x / plot.until, at.y / plot.rows]
      if (x >= left && x <= right && y >= top && y < bottom) return { plot, x, y }
    }
  }
  // What a row does at a moment: the class of its path, and the span's ends.
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
  const mark = document.createElementNS('http://www.w3.org/2000/svg', 'rect')
  mark.setAttribute('fill-opacity', '.25')
  let from
  function point(event) {
    const at = locate(event)
    if (!at) return
    const { plot, x, y } = at
    if (from && from.plot === plot) {
      mark.setAttribute('x', Math.min(x, from.x) * plot.until)
      mark.setAttribute('width', Math.abs(x - from.x) * plot.until)
      mark.setAttribute('y', top * plot.rows)
      mark.setAttribute('height', (bottom - top) * plot.rows)
      plot.svg.append(mark)
    }
    const row = Math.floor(y * plot.rows)
    const [is, ...ends] = span(plot.svg.children[row], x * plot.until) ?? []
    const [begin, end] = ends.map((ns) => words(ns, 1e3, plot.until))
    const does = is ? `${verbs[is]} from ${begin} to ${end}` : 'does nothing'
    readout.textContent = `rank ${plot.svg.dataset.rank}, ${plot.names[row].split(':')[0]} ${does}`
  }
  function enlarge(event) {
    const to = locate(event)
    mark.remove()
    if (from && to && from.plot === to.plot) {
      const [x0, x1] = [from.x, to.x].sort((a, b) => a - b)
      const [y0, y1] = [from.y, to.y].sort((a, b) => a - b)
      // A level stroke keeps all rows.
      const rows = y1 - y0 > 0.1 * (bottom - top) ? [y0, y1] : [top, bottom]
      if (x1 - x0 > 0.004 * (right - left)) show(x0, x1, ...rows)
    }
    from = undefined
  }
  const whole = () => show(0, 1, 0, 1)
  for (const picture of document.querySelectorAll('.timeline figure > svg')) {
    picture.addEventListener('pointerdown', (event) => {
      from = locate(event)
      if (from) picture.setPointerCapture(event.pointerId)
    })
    picture.addEventListener('pointermove', point)
    picture.addEventListener('pointerup', enlarge)
    // A finger that scrolls the page.
    picture.addEventListener('pointercancel', () => {
      mark.remove()
      from = undefined
    })
    picture.addEventListener('dblclick', whole)
  }

  // By how much of what is shown the ends move.
  function move(first, last) {
    const wide = right - left
    const by = Math.min(1 - right, Math.max(-left, wide * first))
    return first === last ? [left + by, right + by] : [left + wide * first, right + wide * last]
  }
  const actions = {
    'zoom in': () => show(...move(0.25, -0.25), top, bottom),
    'zoom out': () => show(...move(-0.5, 0.5), top, bottom),
    earlier: () => show(...move(-0.5, -0.5), top, bottom),
    later: () => show(...move(0.5, 0.5), top, bottom),
    whole,
  }
  const buttons = document.createElement('p')
  buttons.className = 'buttons'
  for (const [name, act] of Object.entries(actions)) {
    const button = document.createElement('button')
    button.type = 'button'
    button.textContent = name
    button.addEventListener('click', act)
    buttons.append(button)
  }
  const charts = document.querySelectorAll('.timeline')
  charts[0].before(buttons)
  charts[charts.length - 1].after(readout)
}
