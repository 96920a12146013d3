// pg-boss on PostgreSQL: large batches, fetched without a pause while they are full, woken by NOTIFY.
//
// Its handler is called once per batch, and the batch is settled as a whole. With `each`, it has the option of its
// documentation that settles every job by itself (perJobResults): a call, an end and an error for each.
//
// The variant is LOOPS-BATCH[-each]: how many loops `work` runs in the process, and how many jobs each fetches at once.
// Its documentation names no sizes for throughput. One loop and a thousand at once is how it counts as a peer; two loops and
// five thousand, the fastest that a search found, stands beside.
'use strict';

const pg = require('pg');
const { PgBoss } = require('pg-boss');
const { mark, address, version, variant, emptyPostgres, main } = require('./protocol.js');

const QUEUE = 'bench';
const EACH = variant.endsWith('-each');
const [LOOPS, BATCH] = (variant || '1-1000').split('-').map(Number);
const SEARCHED = BATCH > 1000;

function create(options) {
  const boss = new PgBoss({ connectionString: address('BENCH_POSTGRES_URL'), ...options });
  boss.on('error', (error) => console.error(error));
  return boss;
}
let producer;

main({
  info: () => ({
    lib: 'pg-boss',
    version: version('pg-boss'),
    backend: 'postgres',
    settings:
      `localConcurrency ${LOOPS}, batchSize ${BATCH}, burstWhenBatchFull, useListenNotify with a notify queue: ` +
      (EACH
        ? 'with perJobResults, which its documentation has for batches whose jobs end each by itself'
        : 'the options of its documentation for many jobs, in ' +
          (SEARCHED ? 'the fastest sizes that a search found' : 'the sizes that the targets were set by')),
    batch: EACH ? '' : `one handler call per batch of ${BATCH}; a failure fails the batch`,
    searched: SEARCHED ? 'the fastest sizes that a search found' : '',
    without: EACH || SEARCHED ? ['enqueue', 'enqueue_bulk', 'latency', 'sync_drain'] : [],
    durability: 'active, then completed (the row is kept); what is active too long, 15 minutes, is retried',
    threads: false,
    pending: { sql: "SELECT count(*) FROM pgboss.job WHERE state < 'completed'" },
  }),
  async setup() {
    await emptyPostgres(pg);
    const boss = create({});
    await boss.start();
    await boss.createQueue(QUEUE, { notify: true });
    await boss.stop({ graceful: false });
  },
  async open() {
    producer = create({ supervise: false, schedule: false });
    await producer.start();
  },
  close: () => producer.stop({ graceful: false }),
  enqueue: (i, s) => producer.send(QUEUE, { i, s }),
  enqueueMany: (items) => producer.insert(QUEUE, items.map(([i, s]) => ({ data: { i, s } }))),
  async worker(plain) {
    const handler = (jobs) => {
      for (let index = 0; index < jobs.length; index++) mark();
    };
    const boss = create({ useListenNotify: true });
    await boss.start();
    const options = { localConcurrency: LOOPS, batchSize: BATCH, pollingIntervalSeconds: 0.5, burstWhenBatchFull: true };
    if (EACH) {
      const one = async (job) => {
        mark();
        return { id: job.id, status: 'completed' };
      };
      await boss.work(QUEUE, { ...options, perJobResults: true }, (jobs) => Promise.all(jobs.map(one)));
    } else {
      await boss.work(QUEUE, options, plain ? handler : async (jobs) => handler(jobs));
    }
  },
});
