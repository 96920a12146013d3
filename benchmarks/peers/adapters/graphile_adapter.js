// graphile-worker on PostgreSQL, with the local queue and the batches of its page on performance.
'use strict';

const pg = require('pg');
const { Logger, makeWorkerUtils, run, runMigrations } = require('graphile-worker');
const { mark, address, version, emptyPostgres, main } = require('./protocol.js');

const AT_ONCE = 24;
const LOCAL_QUEUE = 500;

const logger = new Logger(() => (level, message) => {
  if (level === 'error') console.error(message);
});
const preset = () => ({
  worker: {
    connectionString: address('BENCH_POSTGRES_URL'),
    concurrentJobs: AT_ONCE,
    maxPoolSize: AT_ONCE + 1,
    localQueue: { size: LOCAL_QUEUE },
    completeJobBatchDelay: 0,
    failJobBatchDelay: 0,
    logger,
  },
});
let producer;

main({
  info: () => ({
    lib: 'graphile-worker',
    version: version('graphile-worker'),
    backend: 'postgres',
    settings: `concurrentJobs ${AT_ONCE}, localQueue ${LOCAL_QUEUE}, completeJobBatchDelay 0, addJobs`,
    durability: 'the row is locked, and deleted on success; jobs of a dead worker are unlocked after 4 hours',
    threads: false,
    pending: { sql: 'SELECT count(*) FROM graphile_worker._private_jobs' },
  }),
  async setup() {
    await emptyPostgres(pg);
    await runMigrations({ preset: preset(), logger });
  },
  async open() {
    producer = await makeWorkerUtils({ preset: preset(), logger });
  },
  close: () => producer.release(),
  enqueue: (i, s) => producer.addJob('noop', { i, s }),
  enqueueMany: (items) => producer.addJobs(items.map(([i, s]) => ({ identifier: 'noop', payload: { i, s } }))),
  async worker(plain) {
    const noop = plain ? () => mark() : async () => mark();
    const runner = await run({ preset: preset(), logger, noHandleSignals: true, taskList: { noop } });
    await runner.promise;
  },
});
