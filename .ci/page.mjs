// What a reader of the report can rely on: nothing is missing, nothing complains, in any light and on a phone.
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
await browser.close()
console.log(`report.html: ${records.length} records, light, dark and on a phone; screenshots in ${folder}`)
