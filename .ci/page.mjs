// What a reader of the pages can rely on: nothing is missing, nothing complains, in any light and on a phone.
import chromiumPackage from '@sparticuz/chromium'
import assert from 'node:assert/strict'
import { readdirSync, readFileSync } from 'node:fs'
import { join } from 'node:path'
import { chromium } from 'playwright-core'

const [folder, results] = process.argv.slice(2)
let browser
try {
  chromiumPackage.setGraphicsMode = false
  const executablePath = await chromiumPackage.executablePath()
  browser = await chromium.launch({ executablePath, args: ['--no-sandbox', '--disable-gpu'] })
} catch (error) {
  console.log(`the page was not opened in a browser: it does not start: ${String(error).split('\n')[0]}`)
  process.exit(0)
}

async function open(file, options, check) {
  const context = await browser.newContext(options)
  const page = await context.newPage()
  const said = []
  page.on('console', (message) => said.push(message.text()))
  page.on('pageerror', (error) => said.push(String(error)))
  page.on('request', (request) => request.url().startsWith('http') && said.push(`asks for ${request.url()}`))
  await page.goto(`file://${join(folder, file)}`)
  await check(page)
  assert.deepEqual(said, [], `${file} says something`)
  await context.close()
}

const overflow = (page) => page.evaluate(() => document.documentElement.scrollWidth - document.documentElement.clientWidth)
const background = (page) => page.evaluate(() => getComputedStyle(document.body).backgroundColor)

const records = readdirSync(results)
  .filter((name) => name.endsWith('.json'))
  .map((name) => [name.slice(0, -5), JSON.parse(readFileSync(join(results, name), 'utf8'))])
let light
await open('report.html', { viewport: { width: 1280, height: 1600 }, colorScheme: 'light' }, async (page) => {
  for (const [name, record] of records) {
    const block = page.locator(`details[id="${name}"]`)
    assert.equal(await block.count(), 1, `${name} has a block`)
    const rows = (record.rows ?? record.serving).length
    if (record.kind !== undefined) {
      assert.equal(await block.locator('.cards figure').count(), rows, `${name} has a card for each row`)
    } else if (record.transport !== undefined && record.rows !== undefined) {
      assert.equal(await block.locator('.charts circle').count(), rows, `${name} has a point for each row`)
    } else {
      assert.equal(await block.locator('tbody tr').count(), rows, `${name} has a line for each row`)
    }
  }
  const broken = await page.$$eval('a[href^="#"]', (links) => links.filter((link) => !document.getElementById(link.hash.slice(1))).length)
  assert.equal(broken, 0, 'links lead somewhere')
  await page.keyboard.press('Tab')
  const focus = await page.evaluate(() => [document.activeElement.tagName, getComputedStyle(document.activeElement).outlineStyle])
  assert.deepEqual(focus, ['A', 'solid'], 'the first link shows that it has the focus')
  light = await background(page)
  await page.screenshot({ path: join(folder, 'report.png') })
})
await open('report.html', { viewport: { width: 1280, height: 1600 }, colorScheme: 'dark' }, async (page) => {
  assert.notEqual(await background(page), light, 'dark mode is another')
  await page.screenshot({ path: join(folder, 'report-dark.png') })
})
await open('report.html', { viewport: { width: 390, height: 844 }, colorScheme: 'light' }, async (page) => {
  await page.$$eval('details', (all) => all.forEach((details) => (details.open = true)))
  assert.ok((await overflow(page)) <= 0, `${await overflow(page)} pixels beyond a phone's width`)
  await page.screenshot({ path: join(folder, 'report-phone.png') })
})

// Of two ranks with three workers each, and the same call simulated on SMs.
await open('timeline.html', { viewport: { width: 1280, height: 1600 }, colorScheme: 'light' }, async (page) => {
  const call = page.locator('.timeline').first()
  assert.equal(await call.locator('svg.rows > g').count(), 2 * 3, 'a row for each worker')
  assert.equal(await page.locator('.timeline').count(), 2, 'measured and simulated')
  assert.ok((await page.locator('.timeline figcaption').last().innerText()).startsWith('SIMULATED'), 'what is simulated says so')
  const waits = await call.locator('path.w').evaluateAll((paths) => paths.flatMap((path) => path.getAttribute('d').match(/(?<=h)\d+/g).map(Number)))
  const told = Number(/exposed wait ([\d.]+) us/.exec(await page.title())[1])
  assert.ok(Math.abs(waits.reduce((sum, ns) => sum + ns, 0) / 1000 - told) <= 0.051, `${told} us are told, others are drawn`)
  const plot = call.locator('svg.rows').first()
  const ticks = () => call.locator('.tick').allTextContents()
  const box = await plot.evaluate((svg) => {
    const [a, b] = [[0, 0], svg.getAttribute('viewBox').split(' ').slice(2).map(Number)].map(([x, y]) => new DOMPoint(x, y).matrixTransform(svg.getScreenCTM()))
    return { x: a.x, y: a.y, width: b.x - a.x, height: b.y - a.y }
  })
  await page.mouse.move(box.x + box.width / 3, box.y + box.height / 2)
  assert.match(await page.locator('.readout').innerText(), /^rank 0, worker 1 (waits|multiplies|adds|stores or sends|does nothing)/)
  const [whole, before] = [await plot.getAttribute('viewBox'), await ticks()]
  await page.mouse.down()
  await page.mouse.move(box.x + box.width / 2, box.y + box.height / 2)
  await page.mouse.up()
  const [, , wide] = (await plot.getAttribute('viewBox')).split(' ').map(Number)
  assert.ok(Math.abs(wide / Number(whole.split(' ')[2]) - 1 / 6) < 0.01, `${wide} of ${whole} are shown`)
  assert.notDeepEqual(await ticks(), before, 'the axis follows')
  await page.screenshot({ path: join(folder, 'timeline-part.png') })
  await page.getByRole('button', { name: 'whole' }).click()
  assert.equal(await plot.getAttribute('viewBox'), whole)
  await page.screenshot({ path: join(folder, 'timeline.png') })
})
await open('timeline.html', { viewport: { width: 1280, height: 1600 }, colorScheme: 'dark', javaScriptEnabled: false }, async (page) => {
  assert.equal(await page.locator('.timeline').first().locator('svg.rows > g > title').count(), 2 * 3, 'a picture without a script')
  await page.screenshot({ path: join(folder, 'timeline-dark.png') })
})
await open('timeline.html', { viewport: { width: 390, height: 844 }, colorScheme: 'dark' }, async (page) => {
  assert.notEqual(await background(page), light, 'dark mode is another')
  assert.ok((await overflow(page)) <= 0, `${await overflow(page)} pixels beyond a phone's width`)
  await page.screenshot({ path: join(folder, 'timeline-phone.png'), fullPage: true })
})
await browser.close()
console.log(`report.html: ${records.length} records, timeline.html: two calls; light, dark and on a phone; screenshots in ${folder}`)
