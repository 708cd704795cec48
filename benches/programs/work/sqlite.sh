# Inserts, an index, joins, deletes and a vacuum.
sqlite3 data.db <<'SQL'
CREATE TABLE t(a INTEGER, b TEXT);
WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 200000)
INSERT INTO t SELECT i * 7919 % 100003, printf('%.*c%d', i % 90, 'x', i) FROM n;
CREATE INDEX ta ON t(a);
SELECT count(*), sum(length(b)), max(a) FROM t;
SELECT count(*) FROM t x JOIN t y ON x.a = y.a;
SELECT a % 10, group_concat(substr(b, 1, 3)) = '' FROM t GROUP BY a % 10;
DELETE FROM t WHERE a % 3 = 0;
VACUUM;
PRAGMA integrity_check;
SQL
sqlite3 data.db .dump | sha256sum
