// `node bullmq_jobs.js PORT fill COUNT PAYLOAD` adds jobs with that JSON as their data, with BullMQ's default options.
// `node bullmq_jobs.js PORT start COUNT` takes so many of them as workers do, under the same tokens, and settles none.
//
// The worker does not run by itself: each getNextJob is one moveToActive, which writes the job's lock and the list of
// active jobs. The lock lasts an hour instead of 30 seconds, so that none has expired when the memory is read.
'use strict';

const { Queue, Worker } = require('bullmq');

const BATCH = 1000;
const AT_ONCE = 50;
const HOUR = 3600 * 1000;

const [port, verb, wanted, payload] = process.argv.slice(2);
const connection = { host: '127.0.0.1', port: Number(port) };
const count = Number(wanted);

async function fill() {
  const data = JSON.parse(payload);
  const queue = new Queue('bench', { connection });
  for (let done = 0; done < count; done += BATCH) {
    const jobs = Array.from({ length: Math.min(BATCH, count - done) }, () => ({ name: 'noop', data }));
    await queue.addBulk(jobs);
  }
  await queue.close();
}

async function start() {
  const worker = new Worker('bench', async () => {}, { connection, autorun: false, lockDuration: HOUR });
  let asked = 0;
  async function takeInTurns() {
    while (asked < count) {
      const job = await worker.getNextJob(`${worker.id}:${asked++}`, { block: false });
      if (!job) throw new Error('the queue is empty too early');
    }
  }
  await Promise.all(Array.from({ length: AT_ONCE }, takeInTurns));
  await worker.close(true);
}

({ fill, start })[verb]().then(
  () => process.exit(0),
  (error) => {
    console.error(error);
    process.exit(1);
  },
);
