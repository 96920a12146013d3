-- The first schema. `{ns}` is the namespace, "holdfast" unless the URL says otherwise. The whole file is one transaction.
--
-- A job is in exactly one of four tables: waiting, in_flight, kept, history. Verbs that run often are functions: one round
-- trip each; their plans are kept per server connection, so they need no prepared statements and work through a pooler;
-- and every statement inside sees what was committed before it began, which one long statement would not.

-- The store's clock, in microseconds since 1970. The only place where it is read.
CREATE FUNCTION {ns}_now() RETURNS bigint LANGUAGE sql STABLE PARALLEL SAFE
AS $$ SELECT (extract(epoch FROM statement_timestamp()) * 1000000)::bigint $$;

-- Which database this is: a caller's own connection is asked before a job is entrusted to it.
CREATE TABLE {ns}_identity AS SELECT gen_random_uuid()::text AS id;

-- Jobs that wait, due or not. Rows are inserted and deleted, never updated.
CREATE TABLE {ns}_waiting (
    id              uuid     PRIMARY KEY,
    task            text     NOT NULL,
    payload         bytea    NOT NULL,
    task_version    text     NOT NULL,
    queue           text     COLLATE "C" NOT NULL,
    share           text     COLLATE "C" NOT NULL,
    priority        smallint NOT NULL,
    max_retries     int      NOT NULL,
    retention       bigint   NOT NULL,
    key             text     COLLATE "C",
    key_hash        text,
    key_window      bigint,
    correlation_id  text,
    created_at      bigint   NOT NULL,
    reason          text     NOT NULL DEFAULT 'enqueued',
    run_at          bigint   NOT NULL,
    version         int      NOT NULL DEFAULT 0,
    session_id      text     COLLATE "C",
    attempt         int      NOT NULL DEFAULT 0,
    failures        int      NOT NULL DEFAULT 0,
    crashes         int      NOT NULL DEFAULT 0,
    snoozes         int      NOT NULL DEFAULT 0,
    suspect         bool     NOT NULL DEFAULT false,
    claimed_at      bigint,
    failure_history bytea    NOT NULL DEFAULT '',
    progress        bytea
) WITH (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 1000, autovacuum_vacuum_cost_delay = 1,
        autovacuum_analyze_scale_factor = 0.2, autovacuum_analyze_threshold = 1000);
-- The lanes, each in the order in which it is served.
CREATE INDEX {ns}_lanes ON {ns}_waiting (queue, priority, share, run_at, id);

-- Jobs that a session holds. Rows change in place only where no index looks (a cancel is asked, progress is noted).
CREATE TABLE {ns}_in_flight (
    LIKE {ns}_waiting INCLUDING DEFAULTS,
    cancel_asked bool NOT NULL DEFAULT false,
    PRIMARY KEY (id)
) WITH (fillfactor = 90, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 1000,
        autovacuum_vacuum_cost_delay = 1, autovacuum_analyze_scale_factor = 0.2, autovacuum_analyze_threshold = 1000);
CREATE INDEX {ns}_held ON {ns}_in_flight (session_id, claimed_at);

-- Ended jobs that are removed one by one: dead letters (`expires_at` null: until somebody replays or forgets them), and
-- jobs with an unusually short or long retention.
CREATE TABLE {ns}_kept (
    LIKE {ns}_in_flight INCLUDING DEFAULTS,
    state      text   NOT NULL CHECK (state IN ('succeeded', 'failed', 'cancelled')),
    ended_at   bigint NOT NULL,
    expires_at bigint,
    result     bytea,
    PRIMARY KEY (id)
);
CREATE INDEX {ns}_kept_expiring ON {ns}_kept (expires_at) WHERE expires_at IS NOT NULL;
CREATE INDEX {ns}_dead ON {ns}_kept (id) WHERE state = 'failed';

-- All other ended jobs: two rings of partitions, filled in turn by the time of the end and emptied by TRUNCATE when all
-- that is in one has expired. Slots 0 to 7 take ten minutes each, for a retention up to an hour; slots 8 to 17 a day each,
-- for one up to eight days. Rows beyond the mark in {ns}_pruned have been pruned, though they may still lie there.
CREATE TABLE {ns}_history (
    LIKE {ns}_kept INCLUDING DEFAULTS,
    slot smallint NOT NULL
) PARTITION BY LIST (slot);
DO $$
BEGIN
    FOR slot IN 0..17 LOOP
        EXECUTE format('CREATE TABLE {ns}_history_%s PARTITION OF {ns}_history FOR VALUES IN (%s)', slot, slot);
    END LOOP;
END $$;
CREATE INDEX {ns}_history_id ON {ns}_history (id);
CREATE INDEX {ns}_history_expiring ON {ns}_history (expires_at, id);

CREATE TABLE {ns}_pruned (expires_at bigint NOT NULL, id uuid NOT NULL);
INSERT INTO {ns}_pruned VALUES (0, '00000000-0000-0000-0000-000000000000');

CREATE FUNCTION {ns}_slot(retention bigint, ended_at bigint) RETURNS smallint LANGUAGE sql IMMUTABLE PARALLEL SAFE
AS $$
    SELECT CASE
        WHEN retention BETWEEN 60000000 AND 3600000000 THEN (ended_at / 600000000 % 8)::smallint
        WHEN retention BETWEEN 60000000 AND 691200000000 THEN (8 + ended_at / 86400000000 % 10)::smallint
    END
$$;

-- How many ended jobs there are per queue and state: the sum over all rows. Settlements add rows and never wait for each
-- other; pruning adds them up. `slot` null: the jobs in {ns}_kept.
CREATE TABLE {ns}_tallies (slot smallint, queue text COLLATE "C" NOT NULL, state text NOT NULL, jobs bigint NOT NULL)
WITH (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 1000);

CREATE TABLE {ns}_keys (
    queue      text   COLLATE "C" NOT NULL,
    key        text   COLLATE "C" NOT NULL,
    key_hash   text   NOT NULL,
    job_id     uuid   NOT NULL,
    expires_at bigint NOT NULL,
    PRIMARY KEY (queue, key)
);
CREATE INDEX {ns}_keys_expiring ON {ns}_keys (expires_at);

CREATE TABLE {ns}_sessions (
    id        text   COLLATE "C" PRIMARY KEY,
    beat      bigint NOT NULL DEFAULT 0,
    open      bool   NOT NULL DEFAULT true,
    opened_at bigint NOT NULL,
    beat_at   bigint NOT NULL,
    host      text   NOT NULL,
    pid       int    NOT NULL,
    queues    text   NOT NULL
) WITH (fillfactor = 50);

CREATE TABLE {ns}_paused (queue text COLLATE "C" PRIMARY KEY);

CREATE TABLE {ns}_checkpoints (
    queue text COLLATE "C" NOT NULL, name text COLLATE "C" NOT NULL, value text, PRIMARY KEY (queue, name)
);

-- Every job, with its columns in one order: those of each table, and all. A list is read table by table, newest first: of the
-- whole view, the history would be sorted.
CREATE VIEW {ns}_waiting_jobs AS
    SELECT id, task, payload, task_version, queue, share, priority, max_retries, retention, key, key_hash, key_window,
           correlation_id, created_at, 'ready' AS state, reason, run_at, version, session_id, attempt, failures, crashes,
           snoozes, suspect, false AS cancel_asked, claimed_at, failure_history, progress, NULL::bigint AS ended_at,
           NULL::bytea AS result
    FROM {ns}_waiting;
CREATE VIEW {ns}_held_jobs AS
    SELECT id, task, payload, task_version, queue, share, priority, max_retries, retention, key, key_hash, key_window,
           correlation_id, created_at, 'in_flight' AS state, reason, run_at, version, session_id, attempt, failures,
           crashes, snoozes, suspect, cancel_asked, claimed_at, failure_history, progress, NULL::bigint AS ended_at,
           NULL::bytea AS result
    FROM {ns}_in_flight;
CREATE VIEW {ns}_kept_jobs AS
    SELECT id, task, payload, task_version, queue, share, priority, max_retries, retention, key, key_hash, key_window,
           correlation_id, created_at, state, reason, run_at, version, session_id, attempt, failures, crashes, snoozes,
           suspect, cancel_asked, claimed_at, failure_history, progress, ended_at, result
    FROM {ns}_kept;
CREATE VIEW {ns}_past_jobs AS
    SELECT id, task, payload, task_version, queue, share, priority, max_retries, retention, key, key_hash, key_window,
           correlation_id, created_at, state, reason, run_at, version, session_id, attempt, failures, crashes, snoozes,
           suspect, cancel_asked, claimed_at, failure_history, progress, ended_at, result
    FROM {ns}_history
    WHERE expires_at > {ns}_now() OR (expires_at, id) > (SELECT p.expires_at, p.id FROM {ns}_pruned p);
CREATE VIEW {ns}_jobs AS
    SELECT * FROM {ns}_waiting_jobs UNION ALL SELECT * FROM {ns}_held_jobs
    UNION ALL SELECT * FROM {ns}_kept_jobs UNION ALL SELECT * FROM {ns}_past_jobs;

CREATE FUNCTION {ns}_get(wanted uuid) RETURNS SETOF {ns}_jobs LANGUAGE plpgsql STABLE
SET search_path FROM CURRENT SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET jit = off
AS $$
BEGIN
    RETURN QUERY SELECT * FROM {ns}_jobs j WHERE j.id = wanted LIMIT 1;
END $$;

-- New jobs.

-- Whether one slot of the ring of days holds an id of this range. One statement per slot, so that each has a plan of its own
-- that touches nothing else.
DO $$
BEGIN
    EXECUTE 'CREATE FUNCTION {ns}_in_slot(p_slot int, p_first uuid, p_last uuid) RETURNS bool LANGUAGE plpgsql STABLE AS $f$ '
        || 'BEGIN CASE p_slot ' || (
            SELECT string_agg(format(
                'WHEN %s THEN RETURN EXISTS (SELECT FROM {ns}_history_%s h WHERE h.id BETWEEN p_first AND p_last);', n, n), ' ')
            FROM generate_series(8, 17) n)
        || ' END CASE; END $f$';
END $$;

-- Which of these ids, all of them within a range, belong to a job that is no longer, or not, waiting. It is asked after an
-- insert: until then the job may have been committed, claimed and even ended by others. Ids made one after the other lie close
-- together, so a look at their range answers for nearly every batch. It goes by the settings of the function that calls it.
CREATE FUNCTION {ns}_known(p_ids uuid[], p_first uuid, p_last uuid, now_us bigint) RETURNS uuid[] LANGUAGE plpgsql
AS $$
DECLARE
    near bool; known uuid[];
BEGIN
    SELECT EXISTS (SELECT FROM {ns}_in_flight x WHERE x.id BETWEEN p_first AND p_last)
        OR EXISTS (SELECT FROM {ns}_kept x WHERE x.id BETWEEN p_first AND p_last)
        OR EXISTS (SELECT FROM {ns}_history_0 x WHERE x.id BETWEEN p_first AND p_last)
        OR EXISTS (SELECT FROM {ns}_history_1 x WHERE x.id BETWEEN p_first AND p_last)
        OR EXISTS (SELECT FROM {ns}_history_2 x WHERE x.id BETWEEN p_first AND p_last)
        OR EXISTS (SELECT FROM {ns}_history_3 x WHERE x.id BETWEEN p_first AND p_last)
        OR EXISTS (SELECT FROM {ns}_history_4 x WHERE x.id BETWEEN p_first AND p_last)
        OR EXISTS (SELECT FROM {ns}_history_5 x WHERE x.id BETWEEN p_first AND p_last)
        OR EXISTS (SELECT FROM {ns}_history_6 x WHERE x.id BETWEEN p_first AND p_last)
        OR EXISTS (SELECT FROM {ns}_history_7 x WHERE x.id BETWEEN p_first AND p_last)
    INTO near;
    IF NOT near THEN
        -- A UUIDv7 says when it was made. What was made within a minute of now, by whatever clock, ended today or yesterday,
        -- unless that clock is a day wrong.
        IF ('x' || left(replace(p_first::text, '-', ''), 12))::bit(48)::bigint * 1000 > now_us - 60000000
           AND ('x' || left(replace(p_last::text, '-', ''), 12))::bit(48)::bigint * 1000 < now_us + 60000000 THEN
            near := {ns}_in_slot({ns}_slot(86400000000, now_us), p_first, p_last)
                OR {ns}_in_slot({ns}_slot(86400000000, now_us - 86400000000), p_first, p_last);
        ELSE
            FOR slot IN 8..17 LOOP
                near := near OR {ns}_in_slot(slot, p_first, p_last);
            END LOOP;
        END IF;
    END IF;
    IF near THEN
        -- OFFSET 0: otherwise all that has not expired would be read once and kept in a hash table.
        SELECT array_agg(i.id) INTO known FROM unnest(p_ids) i (id)
        WHERE EXISTS (SELECT FROM {ns}_in_flight x WHERE x.id = i.id OFFSET 0)
           OR EXISTS (SELECT FROM {ns}_kept x WHERE x.id = i.id OFFSET 0)
           OR EXISTS (SELECT FROM {ns}_history x WHERE x.id = i.id
                      AND (x.expires_at > now_us OR (x.expires_at, x.id) > (SELECT p.expires_at, p.id FROM {ns}_pruned p))
                      OFFSET 0);
    END IF;
    RETURN known;
END $$;

-- Insert jobs without keys and limits, whose ids lie from `p_first` to `p_last`. Answers null if all were created, else with the
-- ids of those that were. `p_tell`: the queues to wake.
CREATE FUNCTION {ns}_insert(p_jobs json, p_first uuid, p_last uuid, p_tell text[]) RETURNS uuid[] LANGUAGE plpgsql
SET search_path FROM CURRENT SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET jit = off
AS $$
DECLARE
    now_us bigint := {ns}_now(); made uuid[]; known uuid[];
BEGIN
    WITH made AS (
        INSERT INTO {ns}_waiting AS w (id, task, payload, task_version, queue, share, priority, max_retries, retention,
                                       correlation_id, created_at, run_at)
        SELECT n.id, n.task, decode(n.payload, 'base64'), n.task_version, n.queue, n.share, n.priority, n.max_retries,
               n.retention, n.correlation_id, now_us,
               CASE WHEN n.run_at IS NULL THEN now_us + n.delay ELSE greatest(n.run_at, now_us) END
        FROM json_to_recordset(p_jobs) AS n (id uuid, task text, payload text, task_version text, queue text, share text,
             priority smallint, max_retries int, retention bigint, correlation_id text, delay bigint, run_at bigint)
        ON CONFLICT (id) DO NOTHING
        RETURNING w.id
    )
    SELECT coalesce(array_agg(m.id), '{}') INTO made FROM made m;
    IF made <> '{}' THEN
        known := {ns}_known(made, p_first, p_last, now_us);
        IF known IS NOT NULL THEN
            DELETE FROM {ns}_waiting w WHERE w.id = ANY (known);
            made := ARRAY(SELECT unnest(made) EXCEPT SELECT unnest(known));
        END IF;
    END IF;
    IF p_tell <> '{}' THEN PERFORM pg_notify('{ns}', queue) FROM unnest(p_tell) queue; END IF;
    RETURN CASE WHEN cardinality(made) < json_array_length(p_jobs) THEN made END;
END $$;

-- Insert jobs with keys, limits or a checkpoint, one after the other. An answer for each, in their order. `p_limits`: an
-- object of queues with `max_depth` and `warn_depth`. `p_mark`: the checkpoint, or null; with one it is all or nothing.
CREATE FUNCTION {ns}_insert_checked(p_jobs json, p_limits json, p_mark json, p_tell text[])
RETURNS TABLE (status text, job_id text, key_hash text, deep bool) LANGUAGE plpgsql
SET search_path FROM CURRENT SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET jit = off
AS $$
#variable_conflict use_column
DECLARE
    now_us bigint := {ns}_now(); n record; lim json; depth bigint; depths jsonb := '{}'; found_value text;
    ids uuid[] := ARRAY(SELECT (x ->> 'id')::uuid FROM json_array_elements(p_jobs) x);
    first uuid := (SELECT x FROM unnest(ids) x ORDER BY x LIMIT 1);
    last uuid := (SELECT x FROM unnest(ids) x ORDER BY x DESC LIMIT 1);
    there uuid[]; made uuid[] := '{}';
BEGIN
    IF p_mark IS NOT NULL THEN
        INSERT INTO {ns}_checkpoints (queue, name) VALUES (p_mark ->> 'queue', p_mark ->> 'name') ON CONFLICT DO NOTHING;
        SELECT c.value INTO found_value FROM {ns}_checkpoints c
        WHERE c.queue = p_mark ->> 'queue' AND c.name = p_mark ->> 'name' FOR UPDATE;
        IF found_value IS DISTINCT FROM p_mark ->> 'was' THEN
            RAISE EXCEPTION 'holdfast: the checkpoint has moved' USING ERRCODE = 'HF001';
        END IF;
    END IF;
    IF ids <> '{}' THEN
        there := coalesce({ns}_known(ids, first, last, now_us), '{}') || ARRAY(SELECT w.id FROM {ns}_waiting w WHERE w.id = ANY (ids));
    END IF;
    FOR n IN
        SELECT * FROM json_to_recordset(p_jobs) AS x (id uuid, task text, payload text, task_version text, queue text,
            share text, priority smallint, max_retries int, retention bigint, correlation_id text, delay bigint,
            run_at bigint, key json)
    LOOP
        status := 'created'; job_id := n.id; key_hash := NULL; deep := false;
        IF n.id = ANY (there) THEN
            status := 'existing';
        ELSIF n.key IS NOT NULL THEN
            SELECT k.job_id, k.key_hash INTO job_id, key_hash FROM {ns}_keys k
            WHERE k.queue = n.queue AND k.key = n.key ->> 'text' AND k.expires_at > now_us;
            IF FOUND THEN status := 'held'; ELSE job_id := n.id; key_hash := NULL; END IF;
        END IF;
        lim := p_limits -> n.queue;
        IF status = 'created' AND lim IS NOT NULL THEN
            depth := (depths -> n.queue)::bigint;
            IF depth IS NULL THEN
                SELECT count(*) INTO depth FROM (
                    SELECT FROM {ns}_waiting w WHERE w.queue = n.queue LIMIT
                        greatest((lim ->> 'max_depth')::bigint, (lim ->> 'warn_depth')::bigint) + 1) counted;
            END IF;
            IF depth >= (lim ->> 'max_depth')::bigint THEN
                IF p_mark IS NOT NULL THEN
                    RAISE EXCEPTION 'holdfast: the queue is full' USING ERRCODE = 'HF002';
                END IF;
                status := 'full';
            ELSE
                depth := depth + 1;
                deep := coalesce(depth >= (lim ->> 'warn_depth')::bigint, false);
            END IF;
            depths := depths || jsonb_build_object(n.queue, depth);
        END IF;
        IF status = 'created' AND n.key IS NOT NULL THEN
            INSERT INTO {ns}_keys AS k (queue, key, key_hash, job_id, expires_at)
            VALUES (n.queue, n.key ->> 'text', n.key ->> 'payload_hash', n.id, now_us + (n.key ->> 'window')::bigint)
            ON CONFLICT (queue, key) DO UPDATE
            SET key_hash = excluded.key_hash, job_id = excluded.job_id, expires_at = excluded.expires_at
            WHERE k.expires_at <= now_us;
            IF NOT FOUND THEN  -- somebody took it since we looked; it may be free again by now
                RAISE EXCEPTION 'holdfast: a key was taken meanwhile' USING ERRCODE = 'serialization_failure';
            END IF;
        END IF;
        IF status = 'created' THEN
            INSERT INTO {ns}_waiting (id, task, payload, task_version, queue, share, priority, max_retries, retention,
                                      correlation_id, created_at, run_at, key, key_hash, key_window)
            VALUES (n.id, n.task, decode(n.payload, 'base64'), n.task_version, n.queue, n.share, n.priority,
                    n.max_retries, n.retention, n.correlation_id, now_us,
                    CASE WHEN n.run_at IS NULL THEN now_us + n.delay ELSE greatest(n.run_at, now_us) END,
                    n.key ->> 'text', n.key ->> 'payload_hash', (n.key ->> 'window')::bigint)
            ON CONFLICT (id) DO NOTHING;
            IF FOUND THEN
                made := made || n.id;
                there := there || n.id;
            ELSE
                status := 'existing';
            END IF;
        END IF;
        RETURN NEXT;
    END LOOP;
    IF made <> '{}' AND {ns}_known(made, first, last, now_us) IS NOT NULL THEN
        RAISE EXCEPTION 'holdfast: a job came and was claimed meanwhile' USING ERRCODE = 'serialization_failure';
    END IF;
    IF p_mark IS NOT NULL THEN
        UPDATE {ns}_checkpoints c SET value = p_mark ->> 'now'
        WHERE c.queue = p_mark ->> 'queue' AND c.name = p_mark ->> 'name';
    END IF;
    IF p_tell <> '{}' THEN PERFORM pg_notify('{ns}', queue) FROM unnest(p_tell) queue; END IF;
END $$;

-- The life of a claim.

-- Every lane of a queue that has jobs, by hopping from one to the next in the index.
CREATE FUNCTION {ns}_lanes_of(p_queues text[]) RETURNS TABLE (queue text, priority smallint, share text)
LANGUAGE plpgsql STABLE
SET search_path FROM CURRENT SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_bitmapscan = off
SET jit = off
AS $$
#variable_conflict use_column
DECLARE
    q text; p smallint; s text;
BEGIN
    FOREACH q IN ARRAY p_queues LOOP
        SELECT w.priority, w.share INTO p, s FROM {ns}_waiting w WHERE w.queue = q ORDER BY w.priority, w.share LIMIT 1;
        WHILE FOUND LOOP
            queue := q; priority := p; share := s;
            RETURN NEXT;
            SELECT w.priority, w.share INTO p, s FROM {ns}_waiting w
            WHERE w.queue = q AND (w.priority, w.share) > (p, s) ORDER BY w.priority, w.share LIMIT 1;
        END LOOP;
    END LOOP;
END $$;

-- Claim up to `p_most` due jobs. `p_lanes`: every lane that the caller knows, from which due time on to look there, and whether
-- the caller believes that something is due in it (null: it does not matter). `p_gaps`: the spaces between these lanes.
-- `p_groups`: the places of lanes in `p_lanes`, from 1, in groups in the order of service. If the caller knows too little, nothing
-- is claimed. The last row is no job: its id is null; its version is 0 if the session is not open, 1 if there are other lanes, 2
-- if something else is due (in `key`, the places of the lanes where something is), else 3; and its run_at says when the next
-- job is due, if fewer than `p_most` came.
--
-- Every shape here fixes a plan: LATERAL with LIMIT keeps the lanes outside, `ctid = ANY (ARRAY(...))` finds the rows again
-- without a join. Rows of this table never move, so their ctid still holds.
CREATE FUNCTION {ns}_claim(p_session text, p_lanes json, p_gaps json, p_groups json, p_most int)
RETURNS TABLE (now_us bigint, id text, task text, payload bytea, task_version text, queue text, share text,
               priority smallint, max_retries int, retention bigint, key text, key_hash text, key_window bigint,
               correlation_id text, created_at bigint, state text, reason text, run_at bigint, version int,
               session_id text, attempt int, failures int, crashes int, snoozes int, suspect bool, cancel_asked bool,
               claimed_at bigint, failure_history bytea, progress bytea, ended_at bigint, result bytea)
LANGUAGE plpgsql ROWS 100
SET search_path FROM CURRENT SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_bitmapscan = off
SET jit = off
AS $$
#variable_conflict use_column
DECLARE
    claimed int; as_believed bool; due int[]; taken int[]; room int; quota int; asked int; got int; lane int;
    members int[]; staying int[]; served int[] := '{}'; skips int[] := '{}'; mosts int[] := '{}';
BEGIN
    now_us := {ns}_now();
    version := 0;
    PERFORM FROM {ns}_sessions s WHERE s.id = p_session AND s.open FOR KEY SHARE;
    IF NOT FOUND THEN RETURN NEXT; RETURN; END IF;
    version := 1;
    -- Ranges of one column each: an index scan does not stop at the upper end of a range of rows.
    IF EXISTS (
        SELECT FROM json_to_recordset(p_gaps) AS g (queue text, priority smallint, from_share text, to_share text)
        CROSS JOIN LATERAL (
            SELECT FROM {ns}_waiting w
            WHERE w.queue = g.queue AND w.priority = g.priority AND w.share >= g.from_share AND w.share < g.to_share LIMIT 1) x
    ) OR EXISTS (
        SELECT FROM json_to_recordset(p_gaps) AS g (queue text, after_priority smallint, before_priority smallint)
        CROSS JOIN LATERAL (
            SELECT FROM {ns}_waiting w
            WHERE w.queue = g.queue AND w.priority > g.after_priority AND w.priority < g.before_priority LIMIT 1) x
    ) THEN RETURN NEXT; RETURN; END IF;
    version := 2;
    IF json_array_length(p_lanes) = 1 THEN
        served := '{1}'; skips := '{0}'; mosts := ARRAY[p_most];
    ELSE
        SELECT coalesce(array_agg(c.jobs ORDER BY l.place), '{}'), coalesce(bool_and(l.due IS NULL OR l.due = (c.jobs > 0)), true),
               json_agg(l.place) FILTER (WHERE c.jobs > 0)::text
        INTO due, as_believed, key
        FROM ROWS FROM (json_to_recordset(p_lanes) AS (queue text, priority smallint, share text, since bigint, due bool))
             WITH ORDINALITY AS l (queue, priority, share, since, due, place)
        CROSS JOIN LATERAL (
            SELECT count(*)::int AS jobs FROM (
                SELECT FROM {ns}_waiting w
                WHERE w.queue = l.queue AND w.priority = l.priority AND w.share = l.share
                  AND w.run_at >= l.since AND w.run_at <= now_us
                  AND NOT EXISTS (SELECT FROM {ns}_paused p WHERE p.queue = l.queue)
                LIMIT p_most) x
        ) c;
        IF NOT as_believed THEN RETURN NEXT; RETURN; END IF;
        -- Each group is divided evenly among its lanes; what one leaves over goes to the others: `holdfast.lanes.draw`.
        room := p_most;
        taken := array_fill(0, ARRAY[cardinality(due)]);
        FOR members IN SELECT ARRAY(SELECT m::int FROM json_array_elements_text(g) m) FROM json_array_elements(p_groups) g LOOP
            WHILE room > 0 AND members <> '{}' LOOP
                quota := (room + cardinality(members) - 1) / cardinality(members);
                staying := '{}';
                FOREACH lane IN ARRAY members LOOP
                    asked := least(quota, room);
                    EXIT WHEN asked = 0;
                    got := least(asked, due[lane] - taken[lane]);
                    IF got > 0 THEN
                        served := served || lane; skips := skips || taken[lane]; mosts := mosts || got;
                        taken[lane] := taken[lane] + got;
                        room := room - got;
                    END IF;
                    IF got = asked THEN staying := staying || lane; END IF;
                END LOOP;
                members := staying;
            END LOOP;
        END LOOP;
        -- Others may take, since we counted, what we meant to take: then any lane will do.
        FOR lane IN SELECT m::int FROM json_array_elements(p_groups) g CROSS JOIN json_array_elements_text(g) m LOOP
            served := served || lane; skips := skips || taken[lane]; mosts := mosts || p_most;
        END LOOP;
    END IF;
    key := NULL;
    version := 3;
    -- A later pass of a lane may meet a row of an earlier one again, if somebody let go of a row in between: the row is deleted,
    -- and so inserted, once.
    RETURN QUERY
    WITH lanes AS MATERIALIZED (
        SELECT * FROM ROWS FROM (json_to_recordset(p_lanes) AS (queue text, priority smallint, share text, since bigint))
            WITH ORDINALITY AS l (queue, priority, share, since, place)
    ), picked AS MATERIALIZED (
        SELECT x.* FROM unnest(served, skips, mosts) AS d (lane, skip, most)
        CROSS JOIN LATERAL (SELECT * FROM lanes l WHERE l.place = d.lane OFFSET 0) l
        CROSS JOIN LATERAL (
            SELECT w.ctid AS place, w.* FROM {ns}_waiting w
            WHERE w.queue = l.queue AND w.priority = l.priority AND w.share = l.share
              AND w.run_at >= l.since AND w.run_at <= now_us
              AND NOT EXISTS (SELECT FROM {ns}_paused p WHERE p.queue = l.queue)
            ORDER BY w.run_at, w.id LIMIT d.most OFFSET d.skip FOR UPDATE SKIP LOCKED
        ) x LIMIT p_most
    ), gone AS (
        DELETE FROM {ns}_waiting w WHERE w.ctid = ANY (ARRAY(SELECT p.place FROM picked p)) RETURNING w.*
    ), taken AS (
        INSERT INTO {ns}_in_flight (id, task, payload, task_version, queue, share, priority, max_retries, retention, key,
            key_hash, key_window, correlation_id, created_at, reason, run_at, version, session_id, attempt, failures,
            crashes, snoozes, suspect, claimed_at, failure_history)
        SELECT g.id, g.task, g.payload, g.task_version, g.queue, g.share, g.priority, g.max_retries, g.retention, g.key,
               g.key_hash, g.key_window, g.correlation_id, g.created_at, 'claimed', g.run_at, g.version + 1, p_session,
               g.attempt, g.failures, g.crashes, g.snoozes, g.suspect, now_us, g.failure_history
        FROM gone g
    )
    SELECT now_us, p.id::text, p.task, p.payload, p.task_version, p.queue, p.share, p.priority, p.max_retries, p.retention,
           p.key, p.key_hash, p.key_window, p.correlation_id, p.created_at, 'in_flight'::text, 'claimed'::text, p.run_at,
           p.version + 1, p_session, p.attempt, p.failures, p.crashes, p.snoozes, p.suspect, false, now_us,
           p.failure_history, NULL::bytea, NULL::bigint, NULL::bytea
    FROM picked p;
    GET DIAGNOSTICS claimed = ROW_COUNT;
    IF claimed < p_most THEN
        SELECT min(x.run_at) INTO run_at
        FROM json_to_recordset(p_lanes) AS l (queue text, priority smallint, share text)
        CROSS JOIN LATERAL (
            SELECT w.run_at FROM {ns}_waiting w
            WHERE w.queue = l.queue AND w.priority = l.priority AND w.share = l.share AND w.run_at > now_us
              AND NOT EXISTS (SELECT FROM {ns}_paused p WHERE p.queue = l.queue)
            ORDER BY w.run_at LIMIT 1) x;
    END IF;
    RETURN NEXT;
END $$;

-- Carry out moves of jobs in flight, each of another job, sorted by id so that two batches cannot wait for each other.
-- `p_sessions`: the sessions they name. Answers with those whose guard did not hold: the job as it is now, or nulls. Why
-- they were refused is judged from that.
--
-- The rows are found by LATERAL and deleted by id, never by ctid: rows in flight change in place. Compared with
-- IS NOT DISTINCT FROM, because with `=` the planner prefers the index of sessions.
CREATE FUNCTION {ns}_settle(p_moves json, p_sessions text[], p_follow bool, p_tell text[])
RETURNS TABLE (job_id text, state text, reason text, version int, session_id text, session_open bool, cancel_asked bool)
LANGUAGE plpgsql ROWS 1
SET search_path FROM CURRENT SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_bitmapscan = off
SET jit = off
AS $$
#variable_conflict use_column
DECLARE
    now_us bigint := {ns}_now(); open_sessions text[]; settled uuid[];
BEGIN
    SELECT coalesce(array_agg(o.id), '{}') INTO open_sessions FROM (
        SELECT s.id FROM {ns}_sessions s WHERE s.id = ANY (p_sessions) AND s.open FOR KEY SHARE) o;
    WITH x AS MATERIALIZED (
        SELECT f.id, f.task, f.payload, f.task_version, f.queue, f.share, f.priority, f.max_retries, f.retention, f.key,
               f.key_hash, f.key_window, f.correlation_id, f.created_at, f.run_at, f.version, f.session_id,
               f.cancel_asked, f.claimed_at, f.progress, m."to", m.reason, m.attempt, m.failures, m.crashes, m.snoozes,
               m.suspect, decode(m.failure_history, 'base64') AS failure_history, decode(m.result, 'base64') AS result,
               m.delay, m.key_change, CASE WHEN m."to" <> 'failed' THEN {ns}_slot(f.retention, now_us) END AS slot
        FROM json_to_recordset(p_moves) AS m (job_id uuid, session_id text, version int, session_open bool,
            despite_cancel bool, "to" text, reason text, attempt int, failures int, crashes int, snoozes int, suspect bool,
            failure_history text, result text, delay bigint, key_change text)
        CROSS JOIN LATERAL (
            SELECT * FROM {ns}_in_flight f
            WHERE f.id = m.job_id AND f.version = m.version AND f.session_id IS NOT DISTINCT FROM m.session_id
              AND (m.despite_cancel OR NOT f.cancel_asked)
              AND m.session_open IS NOT DISTINCT FROM (m.session_id = ANY (open_sessions))
            OFFSET 0 FOR UPDATE) f
    ), gone AS (
        DELETE FROM {ns}_in_flight f WHERE f.id = ANY (ARRAY(SELECT x.id FROM x))
    ), back AS (
        INSERT INTO {ns}_waiting (id, task, payload, task_version, queue, share, priority, max_retries, retention, key,
            key_hash, key_window, correlation_id, created_at, reason, run_at, version, session_id, attempt, failures,
            crashes, snoozes, suspect, claimed_at, failure_history, progress)
        SELECT x.id, x.task, x.payload, x.task_version, x.queue, x.share, x.priority, x.max_retries, x.retention, x.key,
               x.key_hash, x.key_window, x.correlation_id, x.created_at, x.reason, coalesce(now_us + x.delay, x.run_at),
               x.version, x.session_id, x.attempt, x.failures, x.crashes, x.snoozes, x.suspect, x.claimed_at,
               x.failure_history, x.progress
        FROM x WHERE x."to" = 'ready'
    ), past AS (
        INSERT INTO {ns}_history (id, task, payload, task_version, queue, share, priority, max_retries, retention, key,
            key_hash, key_window, correlation_id, created_at, reason, run_at, version, session_id, attempt, failures,
            crashes, snoozes, suspect, claimed_at, failure_history, progress, cancel_asked, state, ended_at, expires_at,
            result, slot)
        SELECT x.id, x.task, x.payload, x.task_version, x.queue, x.share, x.priority, x.max_retries, x.retention, x.key,
               x.key_hash, x.key_window, x.correlation_id, x.created_at, x.reason, x.run_at, x.version, x.session_id,
               x.attempt, x.failures, x.crashes, x.snoozes, x.suspect, x.claimed_at, x.failure_history, x.progress,
               x.cancel_asked, x."to", now_us, now_us + x.retention, x.result, x.slot
        FROM x WHERE x."to" <> 'ready' AND x.slot IS NOT NULL
    ), kept AS (
        INSERT INTO {ns}_kept (id, task, payload, task_version, queue, share, priority, max_retries, retention, key,
            key_hash, key_window, correlation_id, created_at, reason, run_at, version, session_id, attempt, failures,
            crashes, snoozes, suspect, claimed_at, failure_history, progress, cancel_asked, state, ended_at, expires_at,
            result)
        SELECT x.id, x.task, x.payload, x.task_version, x.queue, x.share, x.priority, x.max_retries, x.retention, x.key,
               x.key_hash, x.key_window, x.correlation_id, x.created_at, x.reason, x.run_at, x.version, x.session_id,
               x.attempt, x.failures, x.crashes, x.snoozes, x.suspect, x.claimed_at, x.failure_history, x.progress,
               x.cancel_asked, x."to", now_us, CASE WHEN x."to" <> 'failed' THEN now_us + x.retention END, x.result
        FROM x WHERE x."to" <> 'ready' AND x.slot IS NULL
    ), counted AS (
        INSERT INTO {ns}_tallies (slot, queue, state, jobs)
        SELECT x.slot, x.queue, x."to", count(*) FROM x WHERE x."to" <> 'ready' GROUP BY x.slot, x.queue, x."to"
    ), freed AS (
        DELETE FROM {ns}_keys k WHERE k.ctid = ANY (ARRAY(
            SELECT h.place FROM x CROSS JOIN LATERAL (
                SELECT k.ctid AS place FROM {ns}_keys k
                WHERE k.queue = x.queue AND k.key = x.key AND k.job_id = x.id OFFSET 0 FOR UPDATE) h
            WHERE x.key_change = 'free' AND x.key IS NOT NULL))
    )
    SELECT coalesce(array_agg(x.id), '{}') INTO settled FROM x;
    IF p_follow THEN
        PERFORM {ns}_insert_checked((
            SELECT coalesce(json_agg(n), '[]') FROM json_to_recordset(p_moves) AS m (job_id uuid, "then" json)
            CROSS JOIN json_array_elements(m."then") n WHERE m.job_id = ANY (settled)
        ), NULL, NULL, NULL);
    END IF;
    IF p_tell <> '{}' THEN PERFORM pg_notify('{ns}', queue) FROM unnest(p_tell) queue; END IF;
    IF cardinality(settled) < json_array_length(p_moves) THEN
        RETURN QUERY
        SELECT m.job_id::text, j.state, j.reason, j.version, j.session_id, coalesce(s.open, false), j.cancel_asked
        FROM json_to_recordset(p_moves) AS m (job_id uuid)
        LEFT JOIN LATERAL {ns}_get(m.job_id) j ON true
        LEFT JOIN {ns}_sessions s ON s.id = j.session_id
        WHERE NOT m.job_id = ANY (settled);
    END IF;
END $$;

-- One beat. What the session holds is counted from the claim time `p_since` on.
CREATE FUNCTION {ns}_beat(p_session text, p_since bigint)
RETURNS TABLE (open bool, now_us bigint, held bigint, oldest bigint, cancel text[]) LANGUAGE plpgsql
SET search_path FROM CURRENT SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET jit = off
AS $$
#variable_conflict use_column
BEGIN
    now_us := {ns}_now();
    UPDATE {ns}_sessions s SET beat = s.beat + 1, beat_at = now_us WHERE s.id = p_session AND s.open;
    open := FOUND;
    IF open THEN
        SELECT count(*), min(f.claimed_at), coalesce(array_agg(f.id::text) FILTER (WHERE f.cancel_asked), '{}')
        INTO held, oldest, cancel FROM {ns}_in_flight f WHERE f.session_id = p_session AND f.claimed_at >= p_since;
    END IF;
    RETURN NEXT;
END $$;

-- Jobs in flight whose session is not open. Sessions are walked one by one and the spaces between them looked at, so that
-- what open sessions hold, and the traces of what they held, are not read. A session may be opened meanwhile: each statement
-- looks again.
CREATE FUNCTION {ns}_lost(p_session text, p_most int) RETURNS SETOF {ns}_held_jobs LANGUAGE plpgsql
SET search_path FROM CURRENT SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET jit = off
AS $$
DECLARE
    walked record; before text := ''; room int := p_most; touched int;
BEGIN
    IF p_session IS NOT NULL THEN
        RETURN QUERY SELECT * FROM {ns}_held_jobs f WHERE f.session_id = p_session
            AND NOT EXISTS (SELECT FROM {ns}_sessions s WHERE s.id = f.session_id AND s.open) LIMIT room;
        RETURN;
    END IF;
    FOR walked IN SELECT s.id, s.open FROM {ns}_sessions s ORDER BY s.id LOOP
        RETURN QUERY SELECT * FROM {ns}_held_jobs f WHERE f.session_id > before AND f.session_id < walked.id
            AND NOT EXISTS (SELECT FROM {ns}_sessions s WHERE s.id = f.session_id AND s.open) LIMIT room;
        GET DIAGNOSTICS touched = ROW_COUNT;
        room := room - touched;
        IF NOT walked.open THEN
            RETURN QUERY SELECT * FROM {ns}_held_jobs f WHERE f.session_id = walked.id LIMIT room;
            GET DIAGNOSTICS touched = ROW_COUNT;
            room := room - touched;
        END IF;
        IF room <= 0 THEN RETURN; END IF;
        before := walked.id;
    END LOOP;
    RETURN QUERY SELECT * FROM {ns}_held_jobs f WHERE f.session_id > before
        AND NOT EXISTS (SELECT FROM {ns}_sessions s WHERE s.id = f.session_id AND s.open) LIMIT room;
END $$;

-- Operators and keepers.

-- Cancel these jobs, if they wait; with `p_versions`, only in the version given beside the id. Answers with those cancelled.
CREATE FUNCTION {ns}_cancel_waiting(p_ids uuid[], p_versions int[]) RETURNS uuid[] LANGUAGE plpgsql
SET search_path FROM CURRENT SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET jit = off
AS $$
DECLARE
    now_us bigint := {ns}_now(); cancelled uuid[];
BEGIN
    WITH x AS MATERIALIZED (
        SELECT w.*, {ns}_slot(w.retention, now_us) AS slot
        FROM unnest(p_ids, coalesce(p_versions, array_fill(NULL::int, ARRAY[cardinality(p_ids)]))) AS i (id, version)
        CROSS JOIN LATERAL (
            SELECT * FROM {ns}_waiting w
            WHERE w.id = i.id AND (i.version IS NULL OR w.version = i.version) OFFSET 0 FOR UPDATE) w
    ), gone AS (
        DELETE FROM {ns}_waiting w WHERE w.id = ANY (ARRAY(SELECT x.id FROM x))
    ), past AS (
        INSERT INTO {ns}_history (id, task, payload, task_version, queue, share, priority, max_retries, retention, key,
            key_hash, key_window, correlation_id, created_at, reason, run_at, version, session_id, attempt, failures,
            crashes, snoozes, suspect, claimed_at, failure_history, progress, state, ended_at, expires_at, slot)
        SELECT x.id, x.task, x.payload, x.task_version, x.queue, x.share, x.priority, x.max_retries, x.retention, x.key,
               x.key_hash, x.key_window, x.correlation_id, x.created_at, 'cancelled', x.run_at, x.version, x.session_id,
               x.attempt, x.failures, x.crashes, x.snoozes, x.suspect, x.claimed_at, x.failure_history, x.progress,
               'cancelled', now_us, now_us + x.retention, x.slot
        FROM x WHERE x.slot IS NOT NULL
    ), kept AS (
        INSERT INTO {ns}_kept (id, task, payload, task_version, queue, share, priority, max_retries, retention, key,
            key_hash, key_window, correlation_id, created_at, reason, run_at, version, session_id, attempt, failures,
            crashes, snoozes, suspect, claimed_at, failure_history, progress, state, ended_at, expires_at)
        SELECT x.id, x.task, x.payload, x.task_version, x.queue, x.share, x.priority, x.max_retries, x.retention, x.key,
               x.key_hash, x.key_window, x.correlation_id, x.created_at, 'cancelled', x.run_at, x.version, x.session_id,
               x.attempt, x.failures, x.crashes, x.snoozes, x.suspect, x.claimed_at, x.failure_history, x.progress,
               'cancelled', now_us, now_us + x.retention
        FROM x WHERE x.slot IS NULL
    ), counted AS (
        INSERT INTO {ns}_tallies (slot, queue, state, jobs)
        SELECT x.slot, x.queue, 'cancelled', count(*) FROM x GROUP BY x.slot, x.queue
    ), freed AS (
        DELETE FROM {ns}_keys k WHERE k.ctid = ANY (ARRAY(
            SELECT h.place FROM x CROSS JOIN LATERAL (
                SELECT k.ctid AS place FROM {ns}_keys k
                WHERE k.queue = x.queue AND k.key = x.key AND k.job_id = x.id OFFSET 0 FOR UPDATE) h
            WHERE x.key IS NOT NULL))
    )
    SELECT coalesce(array_agg(x.id), '{}') INTO cancelled FROM x;
    RETURN cancelled;
END $$;

-- Cancel what waits, mark what is in flight. An answer for each id, in their order. A job may move on while it is looked for,
-- so what was found nowhere is looked for again.
CREATE FUNCTION {ns}_request_cancel(p_ids uuid[]) RETURNS text[] LANGUAGE plpgsql
SET search_path FROM CURRENT SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET jit = off
AS $$
DECLARE
    left_over uuid[] := ARRAY(SELECT DISTINCT id FROM unnest(p_ids) id ORDER BY id); answers jsonb := '{}'; more jsonb;
BEGIN
    FOR round IN 1..5 LOOP
        SELECT coalesce(jsonb_object_agg(id, 'cancelled'), '{}') INTO more
        FROM unnest({ns}_cancel_waiting(left_over, NULL)) id;
        answers := more || answers;
        WITH asked AS (
            -- Locked in the order of ids, as settlements lock them.
            UPDATE {ns}_in_flight f SET cancel_asked = true WHERE f.id = ANY (ARRAY(
                SELECT x.id FROM unnest(left_over) i (id)
                CROSS JOIN LATERAL (SELECT y.id FROM {ns}_in_flight y WHERE y.id = i.id OFFSET 0 FOR UPDATE) x))
            RETURNING f.id
        )
        SELECT coalesce(jsonb_object_agg(id, 'asked'), '{}') INTO more FROM asked;
        answers := more || answers;
        SELECT coalesce(jsonb_object_agg(j.id, 'ended'), '{}') INTO more
        FROM unnest(left_over) i (id) CROSS JOIN LATERAL {ns}_get(i.id) j
        WHERE j.state NOT IN ('ready', 'in_flight') AND NOT answers ? j.id::text;
        answers := more || answers;
        left_over := ARRAY(SELECT id FROM unnest(left_over) id WHERE NOT answers ? id::text ORDER BY id);
        EXIT WHEN NOT EXISTS (SELECT FROM unnest(left_over) i (id) CROSS JOIN LATERAL {ns}_get(i.id) j);
    END LOOP;
    -- A job named twice was cancelled the first time and had ended the second.
    RETURN ARRAY(
        SELECT CASE WHEN answers ->> i.id::text = 'cancelled'
                     AND i.place > (SELECT min(o.place) FROM unnest(p_ids) WITH ORDINALITY AS o (id, place) WHERE o.id = i.id)
               THEN 'ended' ELSE coalesce(answers ->> i.id::text, 'gone') END
        FROM unnest(p_ids) WITH ORDINALITY AS i (id, place) ORDER BY i.place);
END $$;

-- Bring ended jobs back, one after the other. Answers with the ids of those that came back and, under null, of those whose
-- key belongs to another job now.
CREATE FUNCTION {ns}_revive(p_moves json, p_tell text[]) RETURNS TABLE (job_id text, answer text) LANGUAGE plpgsql
SET search_path FROM CURRENT SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET jit = off
AS $$
#variable_conflict use_column
DECLARE
    now_us bigint := {ns}_now(); m record; j record; taken_slot smallint;
BEGIN
    FOR m IN
        SELECT * FROM json_to_recordset(p_moves) AS x (job_id uuid, version int, reason text, attempt int, failures int,
            crashes int, snoozes int, suspect bool, failure_history text, delay bigint, raise_version bool, key_change text)
    LOOP
        job_id := m.job_id; answer := 'applied';
        -- The row is locked before its key: nobody else decides about this job then.
        SELECT k.*, NULL::smallint AS slot INTO j FROM {ns}_kept k
        WHERE k.id = m.job_id AND k.version = m.version FOR UPDATE;
        IF NOT FOUND THEN
            PERFORM FROM {ns}_pruned FOR SHARE;  -- nobody prunes meanwhile: it would be counted twice
            SELECT h.* INTO j FROM {ns}_history h
            WHERE h.id = m.job_id AND h.version = m.version
              AND (h.expires_at > now_us OR (h.expires_at, h.id) > (SELECT p.expires_at, p.id FROM {ns}_pruned p)) FOR UPDATE;
        END IF;
        CONTINUE WHEN NOT FOUND;
        IF m.key_change = 'take' AND j.key IS NOT NULL THEN
            INSERT INTO {ns}_keys AS k (queue, key, key_hash, job_id, expires_at)
            VALUES (j.queue, j.key, j.key_hash, j.id, now_us + j.key_window)
            ON CONFLICT (queue, key) DO UPDATE
            SET key_hash = excluded.key_hash, job_id = excluded.job_id, expires_at = excluded.expires_at
            WHERE k.expires_at <= now_us OR k.job_id = excluded.job_id;
            IF NOT FOUND THEN
                answer := 'key_taken';
                RETURN NEXT;
                CONTINUE;
            END IF;
        END IF;
        IF j.slot IS NULL THEN
            DELETE FROM {ns}_kept k WHERE k.id = j.id;
        ELSE
            DELETE FROM {ns}_history h WHERE h.slot = j.slot AND h.id = j.id AND h.expires_at = j.expires_at;
        END IF;
        INSERT INTO {ns}_tallies VALUES (j.slot, j.queue, j.state, -1);
        INSERT INTO {ns}_waiting (id, task, payload, task_version, queue, share, priority, max_retries, retention, key,
            key_hash, key_window, correlation_id, created_at, reason, run_at, version, session_id, attempt, failures,
            crashes, snoozes, suspect, claimed_at, failure_history, progress)
        VALUES (j.id, j.task, j.payload, j.task_version, j.queue, j.share, j.priority, j.max_retries, j.retention, j.key,
                j.key_hash, j.key_window, j.correlation_id, j.created_at, m.reason, coalesce(now_us + m.delay, j.run_at),
                j.version + m.raise_version::int, j.session_id, m.attempt, m.failures, m.crashes, m.snoozes, m.suspect,
                j.claimed_at, decode(m.failure_history, 'base64'), j.progress);
        RETURN NEXT;
    END LOOP;
    IF p_tell <> '{}' THEN PERFORM pg_notify('{ns}', queue) FROM unnest(p_tell) queue; END IF;
END $$;

-- Remove ended jobs for good. How many it was.
CREATE FUNCTION {ns}_forget(p_ids uuid[]) RETURNS bigint LANGUAGE plpgsql
SET search_path FROM CURRENT SET enable_seqscan = off SET jit = off
AS $$
DECLARE
    gone bigint;
BEGIN
    PERFORM FROM {ns}_pruned FOR SHARE;  -- nobody prunes meanwhile: what both take away would be counted twice
    WITH kept AS (
        DELETE FROM {ns}_kept k WHERE k.id = ANY (p_ids) RETURNING NULL::smallint AS slot, k.queue, k.state
    ), past AS (
        DELETE FROM {ns}_history h WHERE h.id = ANY (p_ids)
            AND (h.expires_at > {ns}_now() OR (h.expires_at, h.id) > (SELECT p.expires_at, p.id FROM {ns}_pruned p))
        RETURNING h.slot, h.queue, h.state
    ), counted AS (
        INSERT INTO {ns}_tallies (slot, queue, state, jobs)
        SELECT x.slot, x.queue, x.state, -count(*) FROM (SELECT * FROM kept UNION ALL SELECT * FROM past) x
        GROUP BY x.slot, x.queue, x.state RETURNING jobs
    )
    SELECT coalesce(-sum(c.jobs), 0) INTO gone FROM counted c;
    RETURN gone;
END $$;

-- Remove up to `p_most` rows whose time is over. In the rings, only the mark moves on: see {ns}_empty_slot.
CREATE FUNCTION {ns}_prune(p_most int) RETURNS int LANGUAGE plpgsql
SET search_path FROM CURRENT SET enable_seqscan = off SET jit = off
AS $$
DECLARE
    now_us bigint := {ns}_now(); mark record; room int := p_most; touched int;
BEGIN
    WITH gone AS (
        DELETE FROM {ns}_kept k WHERE k.id = ANY (ARRAY(
            SELECT x.id FROM {ns}_kept x WHERE x.expires_at <= now_us ORDER BY x.expires_at LIMIT room FOR UPDATE SKIP LOCKED))
        RETURNING k.queue, k.state
    ), counted AS (
        INSERT INTO {ns}_tallies (queue, state, jobs)
        SELECT g.queue, g.state, -count(*) FROM gone g GROUP BY g.queue, g.state
    )
    SELECT count(*) INTO touched FROM gone;
    room := room - touched;
    SELECT p.expires_at, p.id INTO mark FROM {ns}_pruned p FOR UPDATE SKIP LOCKED;
    IF mark.expires_at > now_us + 5000000 THEN
        -- The clock was set back. What has not expired by it is there, pruned before or not, and is counted anew: in one
        -- statement, as every other one changes a job and its tally together.
        INSERT INTO {ns}_tallies (slot, queue, state, jobs)
        SELECT x.slot, x.queue, x.state, sum(x.jobs) FROM (
            SELECT h.slot, h.queue, h.state, 1 AS jobs FROM {ns}_history h WHERE h.expires_at > now_us
            UNION ALL SELECT t.slot, t.queue, t.state, -t.jobs FROM {ns}_tallies t WHERE t.slot IS NOT NULL) x
        GROUP BY x.slot, x.queue, x.state HAVING sum(x.jobs) <> 0;
        UPDATE {ns}_pruned SET expires_at = now_us, id = 'ffffffff-ffff-ffff-ffff-ffffffffffff';
    ELSIF mark.expires_at < now_us AND room > 0 THEN
        WITH over AS MATERIALIZED (
            SELECT h.expires_at, h.id, h.slot, h.queue, h.state FROM {ns}_history h
            WHERE (h.expires_at, h.id) > (mark.expires_at, mark.id) AND h.expires_at <= now_us
            ORDER BY h.expires_at, h.id LIMIT room
        ), counted AS (
            INSERT INTO {ns}_tallies (slot, queue, state, jobs)
            SELECT o.slot, o.queue, o.state, -count(*) FROM over o GROUP BY o.slot, o.queue, o.state
        ), moved AS (
            UPDATE {ns}_pruned p SET expires_at = o.expires_at, id = o.id
            FROM (SELECT * FROM over ORDER BY over.expires_at DESC, over.id DESC LIMIT 1) o
        )
        SELECT count(*) INTO touched FROM over;
        room := room - touched;
    END IF;
    DELETE FROM {ns}_keys k WHERE k.ctid = ANY (ARRAY(
        SELECT x.ctid FROM {ns}_keys x WHERE x.expires_at <= now_us LIMIT room FOR UPDATE SKIP LOCKED));
    GET DIAGNOSTICS touched = ROW_COUNT;
    room := room - touched;
    DELETE FROM {ns}_sessions s WHERE s.id = ANY (ARRAY(
        SELECT x.id FROM {ns}_sessions x WHERE NOT x.open AND x.beat_at <= now_us - {closed_session_kept}
            AND NOT EXISTS (SELECT FROM {ns}_in_flight f WHERE f.session_id = x.id) LIMIT room FOR UPDATE SKIP LOCKED));
    GET DIAGNOSTICS touched = ROW_COUNT;
    room := room - touched;
    IF (SELECT count(*) FROM (SELECT FROM {ns}_tallies LIMIT 1000) t) = 1000 THEN
        WITH gone AS (
            DELETE FROM {ns}_tallies t WHERE t.ctid = ANY (ARRAY(
                SELECT x.ctid FROM {ns}_tallies x LIMIT 100000 FOR UPDATE SKIP LOCKED)) RETURNING t.*
        )
        INSERT INTO {ns}_tallies (slot, queue, state, jobs)
        SELECT g.slot, g.queue, g.state, sum(g.jobs) FROM gone g GROUP BY g.slot, g.queue, g.state HAVING sum(g.jobs) <> 0;
    END IF;
    RETURN p_most - room;
END $$;

-- The slots of the rings in which everything has been pruned.
CREATE FUNCTION {ns}_pruned_slots() RETURNS SETOF smallint LANGUAGE plpgsql STABLE
SET search_path FROM CURRENT SET enable_seqscan = off SET jit = off
AS $$
DECLARE
    last bigint;
BEGIN
    FOR slot IN 0..17 LOOP
        EXECUTE format('SELECT max(expires_at) FROM {ns}_history_%s', slot) INTO last;
        IF last < least({ns}_now(), (SELECT p.expires_at FROM {ns}_pruned p)) THEN RETURN NEXT slot; END IF;
    END LOOP;
END $$;

-- Empty a slot, if everything in it has been pruned. It waits 10 ms at most for those who read it: whoever writes history
-- may have to wait behind it.
CREATE FUNCTION {ns}_empty_slot(p_slot smallint) RETURNS bool LANGUAGE plpgsql
SET search_path FROM CURRENT SET enable_seqscan = off SET jit = off SET lock_timeout = '10ms'
AS $$
BEGIN
    EXECUTE format('LOCK TABLE {ns}_history_%s IN ACCESS EXCLUSIVE MODE', p_slot);
    IF p_slot NOT IN (SELECT {ns}_pruned_slots()) THEN RETURN false; END IF;
    EXECUTE format('TRUNCATE {ns}_history_%s', p_slot);
    -- What is left over was committed when its time was over already. Tallies are only ever added to: somebody may be adding
    -- them up.
    INSERT INTO {ns}_tallies (slot, queue, state, jobs)
    SELECT t.slot, t.queue, t.state, -sum(t.jobs) FROM {ns}_tallies t WHERE t.slot = p_slot
    GROUP BY t.slot, t.queue, t.state HAVING sum(t.jobs) <> 0;
    RETURN true;
EXCEPTION WHEN lock_not_available THEN
    RETURN false;
END $$;

-- Plain SQL.

-- A UUIDv7 from the clock and random bits, as clients make them. Twelve of the bits tell the fraction of the millisecond: the ids
-- of one statement, which are due at the same time, rise.
CREATE FUNCTION {ns}_new_id() RETURNS uuid LANGUAGE sql VOLATILE
AS $$
    SELECT (lpad(to_hex(us / 1000), 12, '0') || '7' || lpad(to_hex(us % 1000 * 4096 / 1000), 3, '0')
            || substr('89ab', 1 + (random() * 3)::int, 1) || substr(replace(gen_random_uuid()::text, '-', ''), 18))::uuid
    FROM (SELECT {ns}_now() + (extract(epoch FROM clock_timestamp() - statement_timestamp()) * 1000000)::bigint AS us) clock
$$;

-- The jobs that wait, for people. INSERT INTO {ns}_ready (task, payload) is a valid enqueue.
CREATE VIEW {ns}_ready AS
    SELECT id, task, convert_from(payload, 'UTF8') AS payload, task_version, queue, share, priority, run_at, max_retries,
           retention, correlation_id, created_at, attempt, failures, reason
    FROM {ns}_waiting;

CREATE FUNCTION {ns}_ready_insert() RETURNS trigger LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
DECLARE
    now_us bigint := {ns}_now(); valid bool;
BEGIN
    NEW.id := coalesce(NEW.id, {ns}_new_id());
    NEW.task_version := coalesce(NEW.task_version, '1');
    NEW.queue := coalesce(NEW.queue, 'default');
    NEW.share := coalesce(NEW.share, '');
    NEW.priority := coalesce(NEW.priority, 5);
    NEW.max_retries := coalesce(NEW.max_retries, 3);
    NEW.retention := coalesce(NEW.retention, 604800000000);
    NEW.run_at := greatest(coalesce(NEW.run_at, now_us), now_us);
    NEW.created_at := now_us;
    IF coalesce(NEW.task, '') !~ '^[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}$' OR NEW.queue !~ '^[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}$'
       OR NEW.task_version !~ '^[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}$' THEN
        RAISE EXCEPTION 'holdfast: task, queue and task_version must be 1 to 128 letters, digits, "_", "." or "-"'
            USING ERRCODE = 'check_violation';
    ELSIF octet_length(NEW.share) > 128 OR octet_length(NEW.correlation_id) NOT BETWEEN 1 AND 256
       OR concat(NEW.share, NEW.correlation_id) ~ '[\u0001-\u001f\u007f]' THEN
        RAISE EXCEPTION 'holdfast: share has at most 128 bytes, correlation_id 1 to 256, and neither has control characters'
            USING ERRCODE = 'check_violation';
    ELSIF NEW.priority NOT BETWEEN -100 AND 100 THEN
        RAISE EXCEPTION 'holdfast: priority must be a whole number from -100 to 100' USING ERRCODE = 'check_violation';
    ELSIF NEW.max_retries NOT BETWEEN 0 AND 1000 THEN
        RAISE EXCEPTION 'holdfast: max_retries must be a whole number from 0 to 1000' USING ERRCODE = 'check_violation';
    ELSIF NEW.run_at > 9007199254740991 THEN
        RAISE EXCEPTION 'holdfast: run_at must be microseconds since 1970-01-01 UTC, up to the year 2255'
            USING ERRCODE = 'check_violation';
    ELSIF NEW.retention NOT BETWEEN 0 AND 316224000000000 THEN
        RAISE EXCEPTION 'holdfast: retention must be whole microseconds, up to ten years' USING ERRCODE = 'check_violation';
    END IF;
    BEGIN
        valid := json_typeof(NEW.payload::json) = 'object' AND octet_length(NEW.payload) <= 262144;
    EXCEPTION WHEN invalid_text_representation THEN
        valid := false;
    END;
    IF valid IS NOT TRUE THEN
        RAISE EXCEPTION 'holdfast: payload must be a JSON object of named arguments, at most 262144 bytes'
            USING ERRCODE = 'check_violation';
    END IF;
    INSERT INTO {ns}_waiting (id, task, payload, task_version, queue, share, priority, max_retries, retention,
                              correlation_id, created_at, run_at)
    VALUES (NEW.id, NEW.task, convert_to(NEW.payload, 'UTF8'), NEW.task_version, NEW.queue, NEW.share, NEW.priority,
            NEW.max_retries, NEW.retention, NEW.correlation_id, NEW.created_at, NEW.run_at);
    IF {ns}_known(ARRAY[NEW.id], NEW.id, NEW.id, now_us) IS NOT NULL THEN
        RAISE EXCEPTION 'holdfast: a job with this id was there before' USING ERRCODE = 'unique_violation';
    END IF;
    PERFORM pg_notify('{ns}', NEW.queue);  -- once per queue and transaction: the server leaves out repetitions
    RETURN NEW;
END $$;
CREATE TRIGGER {ns}_ready_insert INSTEAD OF INSERT ON {ns}_ready FOR EACH ROW EXECUTE FUNCTION {ns}_ready_insert();
