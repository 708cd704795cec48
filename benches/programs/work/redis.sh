# A server with objects of many sizes, its snapshot loaded again.
redis-server --port 0 --unixsocket "$PWD/s" --dir "$PWD" --save "" --daemonize no > log &
server=$!
trap 'kill $server 2>/dev/null || true' EXIT
tries=0
until redis-cli -s s ping 2>/dev/null; do
    kill -0 $server
    tries=$((tries + 1))
    [ $tries -lt 100 ]
    sleep 0.1
done
redis-benchmark -s s -q -n 20000 -r 1000 -d 500 -t set,get,lpush,hset,zadd > /dev/null
redis-cli -s s eval "for i = 1, 20000 do redis.call('set', 'k' .. i, string.rep('v', i % 997)) end return redis.call('strlen', 'k996')" 0
redis-cli -s s save
redis-cli -s s debug reload || true
redis-cli -s s strlen k19000
redis-cli -s s shutdown nosave || true
wait $server
