// BullMQ on Redis: a hundred jobs at once, done jobs removed.
'use strict';

const { Queue, Worker } = require('bullmq');
const Redis = require('ioredis');
const { mark, address, version, variant, main } = require('./protocol.js');

const QUEUE = 'bench';
const AT_ONCE = Number(variant || 100);
const OPTIONS = { removeOnComplete: true, removeOnFail: true };

const connect = () => new Redis(address('BENCH_REDIS_URL'), { maxRetriesPerRequest: null });
let connection;
let queue;

main({
  info: () => ({
    lib: 'bullmq',
    version: version('bullmq'),
    backend: 'redis',
    settings: `concurrency ${AT_ONCE}, removeOnComplete, addBulk`,
    durability: 'active list and a lock; a stalled job runs again after its lock of 30 s',
    threads: false,
    pending: {
      redis: [
        ['LLEN', `bull:${QUEUE}:wait`],
        ['LLEN', `bull:${QUEUE}:active`],
      ],
    },
  }),
  async setup() {
    const redis = connect();
    await redis.flushdb();
    await redis.quit();
  },
  async open() {
    connection = connect();
    queue = new Queue(QUEUE, { connection });
    await queue.waitUntilReady();
  },
  async close() {
    await queue.close();
    await connection.quit();
  },
  enqueue: (i, s) => queue.add('noop', { i, s }, OPTIONS),
  enqueueMany: (items) => queue.addBulk(items.map(([i, s]) => ({ name: 'noop', data: { i, s }, opts: OPTIONS }))),
  async worker(plain) {
    const handler = plain ? () => mark() : async () => mark();
    const worker = new Worker(QUEUE, handler, { connection: connect(), concurrency: AT_ONCE });
    worker.on('error', (error) => console.error(error));
  },
});
