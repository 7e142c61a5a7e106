"""The local cluster with an accounting: slurmdbd and a small MariaDB of its own, both on the head."""

from __future__ import annotations

import os
import shutil
import subprocess

from tests.slurm.lab import Lab, LabError, until

PACKAGES = ("slurmdbd", "mariadb-server")
_DBD = """AuthType=auth/munge
DbdHost=head
DbdAddr=127.0.0.1
SlurmUser=root
LogFile={root}/log/slurmdbd.log
PidFile=/run/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=slurm
StoragePass=slurm
"""
_GRANT = (
    "create user slurm@localhost identified by 'slurm'; create database slurm_acct_db; "
    "grant all on slurm_acct_db.* to slurm@localhost;"
)


class AccountedLab(Lab):
    """slurmdbd finds its database's socket by MYSQL_UNIX_PORT, since it has no option for it."""

    def _configure(self) -> None:
        super()._configure()
        path = self.root / "etc" / "slurm.conf"
        none, dbd = "AccountingStorageType=accounting_storage/none", "AccountingStorageType=accounting_storage/slurmdbd"
        path.write_text(path.read_text().replace(none, f"{dbd}\nAccountingStorageHost=127.0.0.1"))
        (self.root / "etc" / "slurmdbd.conf").write_text(_DBD.format(root=self.root))
        (self.root / "etc" / "slurmdbd.conf").chmod(0o600)

    def start_slurmctld(self) -> None:
        self._start_accounting()
        super().start_slurmctld()

    def _start_accounting(self) -> None:
        install()
        data, socket = self.root / "mysql", "/run/mysql.sock"
        own = (
            "--no-defaults",
            f"--datadir={data}",
            "--user=root",
            "--innodb-log-file-size=16M",
            "--innodb-flush-method=nosync",
        )
        if not data.exists():
            self.run("mariadb-install-db", *own, "--skip-test-db", "--auth-root-authentication-method=socket")
        small = ("--innodb-buffer-pool-size=32M", "--performance-schema=OFF", "--skip-log-bin", "--max-connections=20")
        lock = "--innodb-lock-wait-timeout=900"  # which slurmdbd demands
        self._daemon("mariadbd", ["mariadbd", *own, *small, lock, "--skip-networking", f"--socket={socket}"])
        client = ("mariadb", "--no-defaults", f"--socket={socket}", "-e")
        until("MariaDB", lambda: not self.run(*client, "select 1", check=False).returncode, 30)
        self.run(*client, _GRANT)
        self._daemon("slurmdbd", ["../bin/env", f"MYSQL_UNIX_PORT={socket}", "/usr/sbin/slurmdbd", "-D"])
        until("slurmdbd", lambda: not self.run("sacctmgr", "-n", "show", "cluster", check=False).returncode, 30)
        self.run("sacctmgr", "-i", "add", "cluster", "lab")


def install() -> None:
    """Have them on this machine; nothing is started as a service."""
    if all(shutil.which(name, path="/usr/sbin:/usr/bin") for name in ("slurmdbd", "mariadbd")):
        return
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}
    words = ["apt-get", "-q", "install", "-y", "--no-install-recommends", *PACKAGES]
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise LabError(f"{' '.join(words)} failed:\n{done.stderr[-2000:]}")
