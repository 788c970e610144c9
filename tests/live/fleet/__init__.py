"""Three machines for tests, in one: `hosts.Hosts` with real kernels' namespaces, real sshd and, where asked, real systemd.

    ground.py    a number that nobody else has now, and every name, address and folder that follows from it
    install.py   what is on a host's disk before its first start      boot.py    pid 1 of a host: its root, its network, its init
    cable.py     bridge, cables, cuts                                  relay.py   a cable that is slow or loses frames
    host.py      one host: power, cable, sshd, commands                hosts.py   all of them, and how ssh finds them
    loopback.py  the same without root: an sshd for each host on a high port of 127.0.0.1
    __main__.py  `make fleet-up`, `make fleet-down`, and one verb for each fault, by hand
"""
