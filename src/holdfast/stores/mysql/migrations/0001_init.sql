-- The first schema. `{ns}` is the namespace, "holdfast" unless the URL says otherwise.
-- The server commits each of these statements by itself, so each may run again after somebody was killed half-way.

-- What waits, clustered by its lane: a claim reads its jobs where they lie, in the order of serving, and locks nothing else.
-- INSERT INTO {ns}_ready (task, payload) is a valid enqueue: the trigger below fills in the rest.
-- The columns are wider than what is allowed, so that the trigger can say what is wrong.
CREATE TABLE IF NOT EXISTS {ns}_ready (
    id              CHAR(36)     CHARACTER SET ascii COLLATE ascii_bin NOT NULL DEFAULT '',
    task            VARCHAR(255) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    payload         LONGBLOB     NOT NULL,
    task_version    VARCHAR(255) CHARACTER SET ascii COLLATE ascii_bin NOT NULL DEFAULT '1',
    queue           VARCHAR(255) CHARACTER SET ascii COLLATE ascii_bin NOT NULL DEFAULT 'default',
    share           VARBINARY(255) NOT NULL DEFAULT '',
    priority        SMALLINT     NOT NULL DEFAULT 5,
    max_retries     INT          NOT NULL DEFAULT 3,
    retention       BIGINT       NOT NULL DEFAULT 604800000000,
    `key`           VARBINARY(512),
    key_hash        VARBINARY(128),
    key_window      BIGINT,
    correlation_id  VARBINARY(512),
    created_at      BIGINT       NOT NULL DEFAULT 0,
    reason          VARCHAR(16)  CHARACTER SET ascii COLLATE ascii_bin NOT NULL DEFAULT 'enqueued',
    run_at          BIGINT       NOT NULL DEFAULT 0,
    version         BIGINT       NOT NULL DEFAULT 0,
    session_id      VARCHAR(128) CHARACTER SET ascii COLLATE ascii_bin,
    attempt         INT          NOT NULL DEFAULT 0,
    failures        INT          NOT NULL DEFAULT 0,
    crashes         INT          NOT NULL DEFAULT 0,
    snoozes         INT          NOT NULL DEFAULT 0,
    suspect         TINYINT      NOT NULL DEFAULT 0,
    cancel_asked    TINYINT      NOT NULL DEFAULT 0,
    claimed_at      BIGINT,
    failure_history LONGBLOB,
    progress        LONGBLOB,
    PRIMARY KEY (queue, priority, share, run_at, id),
    UNIQUE KEY by_id (id)
) ENGINE = InnoDB;

CREATE TABLE IF NOT EXISTS {ns}_in_flight (
    id              CHAR(36)     CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    task            VARCHAR(255) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    payload         LONGBLOB     NOT NULL,
    task_version    VARCHAR(255) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    queue           VARCHAR(255) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    share           VARBINARY(255) NOT NULL,
    priority        SMALLINT     NOT NULL,
    max_retries     INT          NOT NULL,
    retention       BIGINT       NOT NULL,
    `key`           VARBINARY(512),
    key_hash        VARBINARY(128),
    key_window      BIGINT,
    correlation_id  VARBINARY(512),
    created_at      BIGINT       NOT NULL,
    reason          VARCHAR(16)  CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    run_at          BIGINT       NOT NULL,
    version         BIGINT       NOT NULL,
    session_id      VARCHAR(128) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    attempt         INT          NOT NULL,
    failures        INT          NOT NULL,
    crashes         INT          NOT NULL,
    snoozes         INT          NOT NULL,
    suspect         TINYINT      NOT NULL,
    cancel_asked    TINYINT      NOT NULL,
    claimed_at      BIGINT,
    failure_history LONGBLOB,
    progress        LONGBLOB,
    PRIMARY KEY (id),
    KEY held (session_id)
) ENGINE = InnoDB;

-- expires_at is null for a dead letter, kept until somebody replays or forgets it: one index finds those and what is over.
CREATE TABLE IF NOT EXISTS {ns}_ended (
    id              CHAR(36)     CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    task            VARCHAR(255) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    payload         LONGBLOB     NOT NULL,
    task_version    VARCHAR(255) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    queue           VARCHAR(255) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    share           VARBINARY(255) NOT NULL,
    priority        SMALLINT     NOT NULL,
    max_retries     INT          NOT NULL,
    retention       BIGINT       NOT NULL,
    `key`           VARBINARY(512),
    key_hash        VARBINARY(128),
    key_window      BIGINT,
    correlation_id  VARBINARY(512),
    created_at      BIGINT       NOT NULL,
    state           VARCHAR(16)  CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    reason          VARCHAR(16)  CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    run_at          BIGINT       NOT NULL,
    version         BIGINT       NOT NULL,
    session_id      VARCHAR(128) CHARACTER SET ascii COLLATE ascii_bin,
    attempt         INT          NOT NULL,
    failures        INT          NOT NULL,
    crashes         INT          NOT NULL,
    snoozes         INT          NOT NULL,
    suspect         TINYINT      NOT NULL,
    cancel_asked    TINYINT      NOT NULL,
    claimed_at      BIGINT,
    failure_history LONGBLOB,
    progress        LONGBLOB,
    ended_at        BIGINT       NOT NULL,
    expires_at      BIGINT,
    result          LONGBLOB,
    PRIMARY KEY (id),
    KEY expiring (expires_at)
) ENGINE = InnoDB;

-- How many ended jobs there are per queue and state, as changes to be summed up: a single row for each would be written
-- by every settlement, and all of them would wait for each other.
CREATE TABLE IF NOT EXISTS {ns}_totals (
    id    BIGINT       NOT NULL AUTO_INCREMENT,
    queue VARCHAR(255) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    state VARCHAR(16)  CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    jobs  BIGINT       NOT NULL,
    PRIMARY KEY (id)
) ENGINE = InnoDB;

CREATE TABLE IF NOT EXISTS {ns}_keys (
    queue      VARCHAR(255)   CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    `key`      VARBINARY(512) NOT NULL,
    key_hash   VARBINARY(128) NOT NULL,
    job_id     CHAR(36)       CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    expires_at BIGINT         NOT NULL,
    PRIMARY KEY (queue, `key`),
    KEY expiring (expires_at)
) ENGINE = InnoDB;

CREATE TABLE IF NOT EXISTS {ns}_sessions (
    id        VARCHAR(128) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    beat      BIGINT       NOT NULL,
    open      TINYINT      NOT NULL,
    opened_at BIGINT       NOT NULL,
    beat_at   BIGINT       NOT NULL,
    host      VARCHAR(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL,
    pid       BIGINT       NOT NULL,
    queues    MEDIUMTEXT   CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    PRIMARY KEY (id)
) ENGINE = InnoDB;

-- One row for every open session. Claims and settlements lock it against its removal; a beat writes only the row above,
-- so that it never waits for them.
CREATE TABLE IF NOT EXISTS {ns}_gates (
    id VARCHAR(128) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    PRIMARY KEY (id)
) ENGINE = InnoDB;

CREATE TABLE IF NOT EXISTS {ns}_paused (
    queue VARCHAR(255) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    PRIMARY KEY (queue)
) ENGINE = InnoDB;

CREATE TABLE IF NOT EXISTS {ns}_checkpoints (
    queue VARCHAR(255)   CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    name  VARBINARY(512) NOT NULL,
    value LONGBLOB       NOT NULL,
    PRIMARY KEY (queue, name)
) ENGINE = InnoDB;

-- For plain SQL. The engine itself always gives created_at, and passes by.
DROP TRIGGER IF EXISTS {ns}_ready_insert;

CREATE TRIGGER {ns}_ready_insert BEFORE INSERT ON {ns}_ready FOR EACH ROW BEGIN
    DECLARE at_us BIGINT;
    DECLARE chance CHAR(64);
    IF NEW.created_at = 0 OR NEW.created_at IS NULL THEN
        -- The time of this row, not only of its statement: rows of one statement keep their order. The remainder takes
        -- out a change to or from summer time between the two.
        SET at_us = TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))
                + MOD(GREATEST(0, TIMESTAMPDIFF(MICROSECOND, NOW(6), SYSDATE(6))), 1800000000);
        SET chance = SHA2(CONCAT(UUID(), RAND(), CONNECTION_ID()), 256);
        SET NEW.id = COALESCE(NULLIF(NEW.id, ''), LOWER(CONCAT(
            LPAD(HEX(at_us DIV 65536000), 8, '0'), '-', LPAD(HEX(MOD(at_us DIV 1000, 65536)), 4, '0'), '-7',
            SUBSTR(chance, 1, 3), '-', SUBSTR('89ab', 1 + FLOOR(RAND() * 4), 1), SUBSTR(chance, 4, 3), '-',
            SUBSTR(chance, 7, 12))));
        SET NEW.queue = COALESCE(NEW.queue, 'default'), NEW.task_version = COALESCE(NEW.task_version, '1');
        SET NEW.share = COALESCE(NEW.share, ''), NEW.priority = COALESCE(NEW.priority, 5);
        SET NEW.max_retries = COALESCE(NEW.max_retries, 3), NEW.retention = COALESCE(NEW.retention, 604800000000);
        SET NEW.run_at = COALESCE(NEW.run_at, 0);
        IF NEW.id NOT REGEXP '^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$'
           OR NEW.id <> LOWER(NEW.id) OR LENGTH(NEW.id) <> 36 THEN
            SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'holdfast: id must be a UUID in lower case';
        END IF;
        IF NEW.task IS NULL OR LENGTH(NEW.task) NOT BETWEEN 1 AND 128 OR NEW.task REGEXP '[^A-Za-z0-9_.-]'
           OR NEW.task REGEXP '^[.-]' OR LENGTH(NEW.queue) NOT BETWEEN 1 AND 128
           OR NEW.queue REGEXP '[^A-Za-z0-9_.-]' OR NEW.queue REGEXP '^[.-]'
           OR LENGTH(NEW.task_version) NOT BETWEEN 1 AND 128
           OR NEW.task_version REGEXP '[^A-Za-z0-9_.-]' OR NEW.task_version REGEXP '^[.-]' THEN
            SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT =
                'holdfast: task, queue and task_version must be 1 to 128 letters, digits, "_", "." or "-"';
        END IF;
        IF NEW.priority NOT BETWEEN -100 AND 100 THEN
            SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'holdfast: priority must be a whole number from -100 to 100';
        END IF;
        IF NEW.max_retries NOT BETWEEN 0 AND 1000 THEN
            SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'holdfast: max_retries must be a whole number from 0 to 1000';
        END IF;
        IF NEW.run_at NOT BETWEEN 0 AND 9007199254740991 THEN
            SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT =
                'holdfast: run_at must be microseconds since 1970-01-01 UTC, up to the year 2255';
        END IF;
        IF NEW.retention NOT BETWEEN 0 AND 316224000000000 THEN
            SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT =
                'holdfast: retention must be whole microseconds, up to ten years';
        END IF;
        IF LENGTH(NEW.share) > 128 OR CONVERT(CONVERT(NEW.share USING utf8mb4) USING binary) <> NEW.share
           OR LENGTH(NEW.correlation_id) NOT BETWEEN 1 AND 256
           OR CONVERT(CONVERT(NEW.correlation_id USING utf8mb4) USING binary) <> NEW.correlation_id THEN
            SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT =
                'holdfast: share and correlation_id must be UTF-8 text of at most 128 and 256 bytes';
        END IF;
        IF NEW.`key` IS NOT NULL OR NEW.key_hash IS NOT NULL OR NEW.key_window IS NOT NULL THEN
            SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'holdfast: a key can only be given by the client library';
        END IF;
        IF NEW.payload IS NULL OR LENGTH(NEW.payload) > 262144
           OR COALESCE(CONVERT(CONVERT(NEW.payload USING utf8mb4) USING binary) <> NEW.payload, TRUE)
           OR NOT COALESCE(JSON_VALID(CONVERT(NEW.payload USING utf8mb4)), FALSE) THEN
            SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT =
                'holdfast: payload must be a JSON object of named arguments, at most 262144 bytes';
        END IF;
        IF JSON_TYPE(CONVERT(NEW.payload USING utf8mb4)) <> 'OBJECT' THEN
            SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT =
                'holdfast: payload must be a JSON object of named arguments, at most 262144 bytes';
        END IF;
        IF EXISTS (SELECT 1 FROM {ns}_in_flight WHERE id = NEW.id)
           OR EXISTS (SELECT 1 FROM {ns}_ended WHERE id = NEW.id) THEN
            SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'holdfast: a job with this id was there before';
        END IF;
        SET NEW.created_at = at_us, NEW.run_at = GREATEST(NEW.run_at, at_us), NEW.reason = 'enqueued';
        SET NEW.version = 0, NEW.session_id = NULL, NEW.claimed_at = NULL, NEW.progress = NULL;
        SET NEW.attempt = 0, NEW.failures = 0, NEW.crashes = 0, NEW.snoozes = 0, NEW.suspect = 0;
        SET NEW.cancel_asked = 0, NEW.failure_history = '';
    END IF;
END;
