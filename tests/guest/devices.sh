# devices.sh: source it in a guest, for Soft-RoCE devices called rxe0, rxe1 ...

# rxe_on NETDEV [ADDRESS/LENGTH [MTU]]: rxe0 on one network device.
rxe_on() {
    modprobe rdma_rxe || return
    if [[ -n ${2:-} ]]; then
        ip address add "$2" dev "$1" || return
    fi
    # 4200 and more give RoCE packets of 4096 bytes, 1500 gives 1024.
    ip link set "$1" mtu "${3:-9000}" up && rdma link add rxe0 type rxe netdev "$1" && rxe_wait rxe0
}

# rxe_pairs DEVICES [MTU]: rxe0 and rxe1 joined by a cable, rxe2 and rxe3 by another, and so on; rxeN is on vN, and has
# the address 10.88.P.1 or 10.88.P.2, where P numbers the pairs. Pull a cable: ip link set v1 down. Lose packets: tc
# qdisc add dev v0 root netem loss 1%.
#
# All are in one network namespace, because rdma_rxe up to Linux 6.1 at least has its sockets only in the first one. Yet
# packets do cross the cable: the table of the machine's own addresses is asked only for packets that came in by one,
# and each end reaches the other by its own device.
rxe_pairs() {
    local devices=$1 mtu=${2:-9000} index own other
    modprobe -a rdma_rxe veth || return
    echo 0 >/proc/sys/net/ipv4/conf/all/rp_filter
    # One process for all of it: starting one takes a tenth of a second here.
    {
        echo "rule add pref 900 lookup local"
        echo "rule del pref 0"
        for ((index = 0; index < devices; index += 2)); do
            echo "link add v$index type veth peer name v$((index + 1))"
        done
        for ((index = 0; index < (devices + 1) / 2 * 2; index++)); do
            own=10.88.$((index / 2)).$((index % 2 + 1)) other=10.88.$((index / 2)).$((2 - index % 2))
            echo "address add $own/32 dev v$index"
            echo "link set v$index mtu $mtu up"
            echo "rule add pref 10 iif v$index lookup local"
            echo "rule add pref 20 from $own to $other lookup $((100 + index))"
            echo "route add $other dev v$index src $own table $((100 + index))"
        done
    } | ip -batch - || return
    for ((index = 0; index < devices; index++)); do
        echo 1 >"/proc/sys/net/ipv4/conf/v$index/accept_local"
        echo 0 >"/proc/sys/net/ipv4/conf/v$index/rp_filter"
        # One processor takes what arrives, in the order in which it was sent, as a cable would give it. Else packets
        # of one queue pair that were sent on two processors overtake each other, and a sixth is sent again.
        echo 1 >"/sys/class/net/v$index/queues/rx-0/rps_cpus"
        rdma link add "rxe$index" type rxe netdev "v$index" || return
    done
    for ((index = 0; index < devices; index++)); do
        rxe_wait "rxe$index" || return
    done
}

# rxe_wait DEVICE: until its port is active and has the address of its network device.
rxe_wait() {
    local port=/sys/class/infiniband/$1/ports/1 tries gids
    for ((tries = 0; tries < 100; tries++)); do
        gids="$(<"$port/gids/0") $(<"$port/gids/1")"
        if [[ $(<"$port/state") == *ACTIVE && $gids == *:ffff:* ]]; then
            return
        fi
        sleep 0.1
    done
    echo "$1 did not become active, with an IPv4 address, within 10 s: $(<"$port/state"), $gids" >&2
    return 1
}
