// What every Node adapter answers: the same verbs, environment and marks as `protocol.py` tells.
//
// An adapter calls `main` with { info, setup, open, close, enqueue, enqueueMany, worker(plain) }.
'use strict';

const fs = require('node:fs');
const path = require('node:path');
const { performance } = require('node:perf_hooks');

const TEXT = '0123456789abcdef0123456789abcdef';
const BULK = 1000;
const WARM_UP = 5;
const LATENCY_SECONDS = 25;
const LATENCY_AT_LEAST = 30;
const JOB_SECONDS = 20;

const marks = process.env.BENCH_MARKS;
const descriptor = marks ? fs.openSync(marks, 'a') : -1;
const packed = Buffer.alloc(8);
const now = () => process.hrtime.bigint(); // CLOCK_MONOTONIC
const sleep = (milliseconds) => new Promise((resolve) => setTimeout(resolve, milliseconds));

function mark() {
  packed.writeBigInt64LE(now());
  fs.writeSync(descriptor, packed, 0, 8);
}

function address(name) {
  if (!process.env[name]) throw new Error(`${name} is not set`);
  return process.env[name];
}

function version(name) {
  // NODE_PATH is the folder of the packages; a package need not export its package.json
  return JSON.parse(fs.readFileSync(path.join(process.env.NODE_PATH, name, 'package.json'))).version;
}

async function emptyPostgres(pg) {
  const client = new pg.Client({ connectionString: address('BENCH_POSTGRES_URL') });
  await client.connect();
  await client.query('SET client_min_messages = warning');
  const found = await client.query(
    "SELECT nspname FROM pg_namespace WHERE nspname NOT LIKE 'pg\\_%' AND nspname <> 'information_schema'",
  );
  for (const { nspname } of found.rows) await client.query(`DROP SCHEMA ${client.escapeIdentifier(nspname)} CASCADE`);
  await client.query('CREATE SCHEMA public');
  await client.end();
}

async function enqueueOne(peer, count) {
  await peer.open();
  const started = performance.now();
  for (let number = 0; number < count; number++) await peer.enqueue(number, TEXT);
  const seconds = (performance.now() - started) / 1000;
  await peer.close();
  return { n: count, seconds };
}

async function enqueueBulk(peer, count) {
  await peer.open();
  const started = performance.now();
  for (let low = 0; low < count; low += BULK) {
    const items = [];
    for (let number = low; number < Math.min(count, low + BULK); number++) items.push([number, TEXT]);
    await peer.enqueueMany(items);
  }
  const seconds = (performance.now() - started) / 1000;
  await peer.close();
  return { n: count, seconds };
}

const ran = () => Math.floor(fs.statSync(marks).size / 8);

function lastMark() {
  const file = fs.openSync(marks, 'r');
  const read = Buffer.alloc(8);
  fs.readSync(file, read, 0, 8, fs.fstatSync(file).size - 8);
  fs.closeSync(file);
  return read.readBigInt64LE();
}

async function latency(peer, count, limit) {
  await peer.open();
  const times = [];
  const calls = [];
  const deadline = Date.now() + limit * 1000;
  for (let number = 0; number < count + WARM_UP; number++) {
    if (Date.now() > deadline && times.length >= LATENCY_AT_LEAST) break;
    const before = ran();
    const started = now();
    await peer.enqueue(number, TEXT);
    const returned = now();
    const latest = Date.now() + JOB_SECONDS * 1000;
    while (ran() === before) {
      if (Date.now() > latest) throw new Error(`a job did not run within ${JOB_SECONDS} s`);
      await sleep(1);
    }
    if (number >= WARM_UP) {
      times.push(Number(lastMark() - started) / 1e6);
      calls.push(Number(returned - started) / 1e6);
    }
    await sleep(5 + Math.random() * 10);
  }
  await peer.close();
  times.sort((a, b) => a - b);
  calls.sort((a, b) => a - b);
  const last = times.length - 1;
  return {
    n: times.length,
    p50: times[Math.floor(times.length / 2)],
    p99: times[Math.min(last, Math.floor(times.length * 0.99))],
    max: times[last],
    call_p50: calls[Math.floor(calls.length / 2)],
  };
}

function verbsOf(peer) {
  // every call of a Node library is awaited, so that there is one kind of enqueue under both names
  const verbs = ['info', 'setup', 'enqueue_one', 'worker', 'latency', 'enqueue_one_async'];
  return peer.enqueueMany ? [...verbs, 'enqueue_bulk'] : verbs;
}

async function answer(peer, verb, [first, second]) {
  const count = Number(first);
  switch (verb) {
    case 'info':
      return { ...peer.info(), language: 'node', runtime: process.version, verbs: verbsOf(peer) };
    case 'setup':
      await peer.setup();
      return { ok: true };
    case 'enqueue_one':
    case 'enqueue_one_async':
      return enqueueOne(peer, count);
    case 'enqueue_bulk':
      return enqueueBulk(peer, count);
    default:
      return latency(peer, count, second ? Number(second) : LATENCY_SECONDS);
  }
}

async function main(peer) {
  const [verb, ...rest] = process.argv.slice(2);
  if (!verbsOf(peer).includes(verb)) throw new Error(`no such verb: ${verb}`);
  if (verb === 'worker') {
    process.on('SIGTERM', () => process.exit(0));
    await peer.worker(rest.includes('--plain'));
  } else {
    console.log(JSON.stringify(await answer(peer, verb, rest)));
    process.exit(0);
  }
}

module.exports = {
  mark,
  address,
  version,
  emptyPostgres,
  variant: process.env.BENCH_VARIANT || '',
  main: (peer) =>
    main(peer).catch((error) => {
      console.error(error);
      process.exit(1);
    }),
};
