"""TLS of the control plane: one CA for both sides, and what is wrong with a certificate, in words.

gRPC does the TLS of the job; it tells no more of a handshake that failed than that it did. So files are read and tried
here when a process starts, and a handshake of our own goes ahead of gRPC's.
"""

import base64
import os
import re
import socket
import ssl
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from jaxrdma.cluster import TlsFiles
from jaxrdma.errors import ConfigError

# Of OpenSSL's x509_vfy.h; the module ssl has no names for them.
_NOT_YET_VALID, _EXPIRED = 9, 10
_OF_ANOTHER_CA = (2, 7, 18, 19, 20, 21)
_NOT_FOR_THIS = 26
_OTHER_NAME = (62, 64)
_NO_CHECK_TIME = 0x200000

# Keys that OpenSSL takes, and gRPC's BoringSSL turns away from a client: how they are called, by their name in ASN.1.
_NOT_OF_GRPC = {
    bytes.fromhex("06032b6570"): "Ed25519",
    bytes.fromhex("06032b6571"): "Ed448",
    bytes.fromhex("06052b81040023"): "ECDSA on P-521",
}

_HANDSHAKE, _ALERT = 0x16, 0x15  # how a record of TLS begins that answers a hello
# gRPC closes the connection of who has no certificate that it takes, mostly without a word. So does a process that just
# ends; it does not do so again and again.
_TURNED_AWAY = 3
_AGAIN_SECONDS = 0.2

_KEYS = "Expected a private key in PEM: RSA of 2048 bits or more, or ECDSA on P-256 or P-384"
ALL_OR_NONE = "Set JAXRDMA_TLS_CERT, JAXRDMA_TLS_KEY and JAXRDMA_TLS_CA on every process of the job, or on none"


class TlsError(Exception):
    """Two processes cannot speak TLS, and will not the next time: "its certificate ..."."""


class Identity:
    """The certificate by which this process is known, its key, and the CA that others' certificates must be of.

    **Arguments:**

    - `files`: where they are.
    - `who`: this process, for texts.
    - `serves`: it is the coordinator; others show their certificates to its port.
    - `named`: by which host others know it, if that can be told.

    **Attributes:** `cert`, `key`, `ca`: what stands in the files.

    **Raises:** `ConfigError` if a file cannot be read or is something else, the key is of another certificate, or the
    certificate is one that a peer with the same CA would not take.
    """

    def __init__(
        self, files: TlsFiles, who: str, *, serves: bool = False, named: str | None = None
    ) -> None:
        self._files = files
        self._how = (who, serves, named)
        # Before the files are read: what is written meanwhile is seen the next time.
        self._stamps = _stamps(files)
        self.cert = _read("CERT", files.cert, "CERTIFICATE", who)
        self.key = _read("KEY", files.key, "PRIVATE KEY", who)
        self.ca = _read("CA", files.ca, "CERTIFICATE", who)
        self._check_key(who)
        # Made once: the files may be replaced, or gone, when a coordinator comes at last.
        self._client = self._context(ssl.PROTOCOL_TLS_CLIENT)
        self._check_certificate(who, serves, named)

    def renewed(self) -> "Identity | None":
        """The identity that stands in the files now, if they have changed since they were last looked at.

        **Raises:** `ConfigError`, once, if that is none: this one is still good, or as good as it was.
        """
        stamps = _stamps(self._files)
        if stamps == self._stamps:
            return None
        self._stamps = stamps
        who, serves, named = self._how
        return Identity(self._files, who, serves=serves, named=named)

    def greet(self, connect: Callable[[], socket.socket], host: str) -> None:
        """A handshake as gRPC will make one, on connections that `connect` makes, with who is known as `host`.

        **Raises:** `TlsError`; `OSError` for what may be otherwise soon.
        """
        for again in range(_TURNED_AWAY):
            if again:
                time.sleep(_AGAIN_SECONDS)  # who refuses by closing does not say when it will not
            try:
                if self._greet_once(connect, host):
                    return
            except ssl.SSLCertVerificationError as error:
                raise TlsError(self._judge(error, connect, host)) from None
            except ConnectionRefusedError:
                raise  # it has ended since
            except (ssl.SSLEOFError, ConnectionError):
                raise ConnectionError("it ends the connection instead of a TLS handshake") from None
            except TimeoutError:
                text = "its port is open, but nothing answers a TLS handshake"
                raise ConnectionError(text) from None
            except ssl.SSLError as error:
                raise TlsError(self._name(error, connect)) from None
        raise TlsError(self._turned_away("it closes the connection"))

    def _greet_once(self, connect: Callable[[], socket.socket], host: str) -> bool:
        """Whether the other side takes our certificate: it speaks once it has seen it."""
        with connect() as plain, self._client.wrap_socket(plain, server_hostname=host) as sock:
            try:
                return bool(sock.recv(1))
            except (ssl.SSLEOFError, ConnectionError):
                return False
            except TimeoutError:
                raise
            except ssl.SSLError as error:
                raise TlsError(self._turned_away(_words(error))) from None

    def _turned_away(self, how: str) -> str:
        own = _text(_own(self._files))
        return (
            f"it turns the certificate of this process away, JAXRDMA_TLS_CERT={self._files.cert} ({own}): {how}. "
            "Has the coordinator the CA in its JAXRDMA_TLS_CA that issued this one, and the right time?"
        )

    def _name(self, error: ssl.SSLError, connect: Callable[[], socket.socket]) -> str:
        try:
            plain = not speaks_tls(connect)
        except OSError:
            plain = False
        if plain:
            return f"it answers without TLS, which this process is set to speak. {ALL_OR_NONE}"
        return f"the handshake failed: {_words(error)}"

    def _judge(
        self, error: ssl.SSLCertVerificationError, connect: Callable[[], socket.socket], host: str
    ) -> str:
        """What is wrong with the certificate of the other side."""
        try:
            shown = _look(connect)
        except OSError:
            shown = {}
        text = _text(shown)
        code = error.verify_code
        if code in _OTHER_NAME:
            return (
                f"its certificate is for {_names(shown) or 'another name'}, and {host} was expected, by which this "
                f"process knows it. Issue it a certificate with {host} as subject alternative name, or let "
                "JAXRDMA_COORDINATOR name it as its certificate does"
            )
        if code in (_EXPIRED, _NOT_YET_VALID):
            return (
                f"its certificate ({text}) {_out_of_time(code, shown)}. Renew the coordinator's JAXRDMA_TLS_CERT, or "
                "set the clock of this machine right"
            )
        if code in _OF_ANOTHER_CA:
            return (
                f"its certificate ({text}) is of another CA than expected, which stands in "
                f"JAXRDMA_TLS_CA={self._files.ca}. Give all processes certificates of one CA"
            )
        if code == _NOT_FOR_THIS:
            return f"its certificate ({text}) may not be used by a server. Issue one for server authentication"
        return f"its certificate ({text}) is not accepted: {error.verify_message}"

    def _context(self, protocol: int) -> ssl.SSLContext:
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.load_verify_locations(cadata=_ascii(self.ca))
        context.load_cert_chain(self._files.cert, self._files.key, _no_password)
        context.set_alpn_protocols(["h2"])  # gRPC does not talk to who does not ask for it
        return context

    def _check_key(self, who: str) -> None:
        said = f"{who}: JAXRDMA_TLS_KEY={self._files.key}"
        if b"ENCRYPTED" in self.key:
            raise ConfigError(
                f"{said} is encrypted, and nobody can be asked for a password. Expected a key without one, which only "
                "its owner can read: `openssl pkey -in KEY -out PLAIN`"
            )
        for name, path, pem in (
            ("CERT", self._files.cert, self.cert),
            ("CA", self._files.ca, self.ca),
        ):
            try:
                ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=_ascii(pem))
            except ssl.SSLError as error:
                raise ConfigError(
                    f"{who}: JAXRDMA_TLS_{name}={path}: expected certificates in PEM, and one of them cannot be read: "
                    f"{_words(error)}"
                ) from None
        try:
            self._context(ssl.PROTOCOL_TLS_CLIENT)
        except ssl.SSLError as error:
            if error.reason == "KEY_VALUES_MISMATCH":
                raise ConfigError(
                    f"{said} is not the key of JAXRDMA_TLS_CERT={self._files.cert}. Expected the key with which that "
                    "certificate was asked for"
                ) from None
            raise ConfigError(
                f"{said} cannot be used with JAXRDMA_TLS_CERT={self._files.cert}: {_words(error)}. {_KEYS}"
            ) from None
        kind = next((kind for name, kind in _NOT_OF_GRPC.items() if name in _der(self.key)), "")
        if kind:
            raise ConfigError(f"{said} is of {kind}, which gRPC does not take. {_KEYS}")

    def _check_certificate(self, who: str, serves: bool, named: str | None) -> None:
        """Show it to ourselves, as a peer with the same CA would see it."""
        server = self._context(ssl.PROTOCOL_TLS_SERVER)
        client = self._context(ssl.PROTOCOL_TLS_CLIENT)
        client.check_hostname = serves and named is not None
        if serves:
            server.verify_mode = ssl.CERT_NONE
        else:
            client.verify_mode = ssl.CERT_NONE
            server.verify_mode = ssl.CERT_REQUIRED
        try:
            _shake(client, server, named)
        except ssl.SSLCertVerificationError as error:
            raise ConfigError(f"{who}: {self._judge_own(error, serves, named)}") from None
        except ssl.SSLError as error:
            raise ConfigError(
                f"{who}: JAXRDMA_TLS_CERT={self._files.cert} cannot be used: {_words(error)}"
            ) from None

    def _judge_own(
        self, error: ssl.SSLCertVerificationError, serves: bool, named: str | None
    ) -> str:
        shown = _own(self._files)
        said = f"JAXRDMA_TLS_CERT={self._files.cert} ({_text(shown)})"
        code = error.verify_code
        if code in _OTHER_NAME:
            return (
                f"{said} is the coordinator's, and the others know it as {named}. Expected a certificate with {named} "
                "as subject alternative name: issue one, or name the coordinator as this one does"
            )
        if code in (_EXPIRED, _NOT_YET_VALID):
            return f"{said} {_out_of_time(code, shown)}. Renew it, or set the clock of this machine right"
        if code in _OF_ANOTHER_CA:
            return (
                f"{said} is of another CA than expected, which stands in JAXRDMA_TLS_CA={self._files.ca}. Give all "
                "processes certificates of one CA, with all that is between it and them"
            )
        if code == _NOT_FOR_THIS:
            role = "server" if serves else "client"
            return f"{said} may not be used by a {role}. Issue one for {role} authentication"
        return f"{said} would not be accepted: {error.verify_message}"


def _look(connect: Callable[[], socket.socket]) -> dict[str, Any]:
    """What stands in the certificate of who listens there, whatever is wrong with it."""
    context = _trust_anybody()
    with connect() as plain, context.wrap_socket(plain) as sock:
        shown = sock.getpeercert(True)
    if shown is None:
        return {}
    # The module reads certificates to us once they are verified: this one, by itself.
    _trust_only(context, shown)
    with connect() as plain, context.wrap_socket(plain) as sock:
        return cast(dict[str, Any], sock.getpeercert() or {})


def speaks_tls(connect: Callable[[], socket.socket]) -> bool:
    """Whether who listens there answers a hello of TLS with TLS.

    **Raises:** `OSError` if nothing comes.
    """
    context = _trust_anybody()
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    hello = context.wrap_bio(incoming, outgoing)
    try:
        hello.do_handshake()
    except ssl.SSLWantReadError:
        pass
    with connect() as sock:
        sock.sendall(outgoing.read())
        answer = sock.recv(1)
    return bool(answer) and answer[0] in (_HANDSHAKE, _ALERT)


def _read(name: str, path: str, expected: str, who: str) -> bytes:
    try:
        text = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(
            f"{who}: JAXRDMA_TLS_{name}={path} cannot be read: {(error.strerror or str(error)).lower()} "
            f"(errno {error.errno})"
        ) from None
    if expected.encode() + b"-----" not in text:
        raise ConfigError(
            f"{who}: JAXRDMA_TLS_{name}={path}: expected a file in PEM with a {expected}, and there is none in it"
        )
    return text


def _ascii(pem: bytes) -> str:
    return pem.decode("ascii", "ignore")  # between its blocks may stand anything


def _der(pem: bytes) -> bytes:
    """What the blocks of a file in PEM say, one after the other."""
    return b"".join(
        base64.b64decode(block)
        for block in re.findall(rb"-----BEGIN [^-]+-----([^-]+)-----END", pem)
    )


def _stamps(files: TlsFiles) -> list[tuple[int, int]]:
    """By which it is seen that a file was written again, or another put in its place."""
    stamps: list[tuple[int, int]] = []
    for path in (files.cert, files.key, files.ca):
        try:
            found = os.stat(path)
            stamps.append((found.st_mtime_ns, found.st_ino))
        except OSError:
            stamps.append((0, 0))
    return stamps


def _no_password() -> str:
    return ""  # else OpenSSL asks for one at the terminal


def _shake(client: ssl.SSLContext, server: ssl.SSLContext, host: str | None = None) -> Any:
    """A handshake of this process with itself: what the client then knows of the server's certificate."""
    one, other = ssl.MemoryBIO(), ssl.MemoryBIO()
    ours = client.wrap_bio(one, other, server_hostname=host)
    theirs = server.wrap_bio(other, one, server_side=True)
    for _ in range(4):  # a hello, its answer, the certificate, and whether that was one
        for side in (ours, theirs):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
    return ours.getpeercert() or {}


def _trust_anybody() -> ssl.SSLContext:
    """To look at who is there, and say nothing to him."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    return context


def _trust_only(context: ssl.SSLContext, cert: bytes | str) -> None:
    """Let `context` verify this one certificate, whoever issued it and whenever it is valid."""
    context.verify_mode = ssl.CERT_REQUIRED
    context.verify_flags |= ssl.VerifyFlags.VERIFY_X509_PARTIAL_CHAIN | _NO_CHECK_TIME
    context.load_verify_locations(cadata=cert)


def _own(files: TlsFiles) -> dict[str, Any]:
    """What stands in our own certificate; nothing if that cannot be found out."""
    try:
        server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        server.load_cert_chain(files.cert, files.key, _no_password)
        client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        client.check_hostname = False
        _trust_only(client, _ascii(Path(files.cert).read_bytes()))
        return _shake(client, server)
    except (OSError, ValueError):
        return {}


def _text(cert: dict[str, Any]) -> str:
    """A certificate in a few words: for whom, by whom, until when."""
    if not cert:
        return "of which nothing can be read"
    issuer = ", ".join(value for part in cert.get("issuer", ()) for _, value in part)
    return f"for {_names(cert) or 'nobody'}, issued by {issuer or 'nobody'}, valid until {cert.get('notAfter')}"


def _names(cert: dict[str, Any]) -> str:
    names = [value for _, value in cert.get("subjectAltName", ())]
    return ", ".join(names or [value for part in cert.get("subject", ()) for _, value in part])


def _out_of_time(code: int, cert: dict[str, Any]) -> str:
    now = time.strftime("%b %d %H:%M:%S %Y GMT", time.gmtime())
    if code == _NOT_YET_VALID:
        return f"is not valid before {cert.get('notBefore', 'some later time')}: expected one for {now}, which is now"
    if cert and ssl.cert_time_to_seconds(cert["notAfter"]) > time.time():
        return f"was issued by a CA that has expired: expected one that is valid now, {now}"
    return f"has expired: expected one that is valid now, {now}"


def _words(error: ssl.SSLError) -> str:
    return (error.reason or str(error)).replace("_", " ").lower()
