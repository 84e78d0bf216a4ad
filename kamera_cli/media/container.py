"""Open a container safely, choose its video stream and walk its packets."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO, cast

import av
from av.stream import Disposition

from .errors import MediaError

#: Demuxers that read the file itself and nothing else; playlists and scripts that name other files are out.
_DEMUXERS = (
    "aac,aiff,asf,av1,avi,flac,flv,gxf,h264,hevc,ivf,matroska,webm,matroska,webm,mjpeg,mov,mp4,m4a,3gp,3g2,mj2,"
    "mp3,mpeg,mpegts,mpegtsraw,mpegvideo,mxf,nut,obu,ogg,rm,vc1,vvc,w64,wav,yuv4mpegpipe"
)
_WITHOUT_TIMES = frozenset(("h264", "hevc", "vvc", "mpegvideo", "m4v", "mjpeg", "obu", "vc1"))
_NO_PICTURES = Disposition.attached_pic | Disposition.timed_thumbnails | Disposition.still_image
_STRICT = {"err_detect": "crccheck+explode"}
"""Without this a decoder paints over damage and says nothing."""


class _Bytes:
    """A file without its name, which the library would take for a URL or fail to encode."""

    def __init__(self, file: BinaryIO) -> None:
        self.read = file.read
        self.seek = file.seek
        self.tell = file.tell


def decoder_name() -> str:
    """Return what decodes video, with the versions of the libraries that can change a pixel."""
    codec, scale = (".".join(map(str, av.library_versions[name])) for name in ("libavcodec", "libswscale"))
    return f"pyav {av.__version__} libavcodec {codec} libswscale {scale}"


def reason_of(error: av.FFmpegError) -> str:
    """Return what an FFmpeg error says, without its number and without the file name."""
    return (error.strerror or str(error)).rstrip(".")


@contextmanager
def opened(path: str, file: BinaryIO) -> Iterator[av.container.InputContainer]:
    """Open a container on a file and close it afterwards.

    Parameters
    ----------
    path : str
        For errors.
    file : binary file
        Seekable; read from its start.

    Raises
    ------
    MediaError
        If no known container opens.
    """
    file.seek(0)
    try:
        container = av.open(
            _Bytes(file),
            mode="r",
            container_options={"format_whitelist": _DEMUXERS, "protocol_whitelist": "none"},
            metadata_errors="replace",
            buffer_size=1 << 17,
        )
    except av.FFmpegError as error:
        raise MediaError(
            path,
            f"no video can be opened in it ({reason_of(error)})",
            "its index may be missing: a recording that was cut off, or a download that did not finish",
        ) from error
    with container:
        yield container


def choose_stream(
    path: str, container: av.container.InputContainer
) -> tuple[av.VideoStream, tuple[str, ...]]:
    """Choose the video stream to read and turn its threads on.

    Pictures attached to a sound file and thumbnails are no video. Of the others the first choice is one that
    is marked as default, then the one with the largest area, then the lowest index.

    Returns
    -------
    stream : av.VideoStream
    notes : tuple of str
        Says which one was taken where there was a choice.

    Raises
    ------
    MediaError
        If there is no video stream or no decoder for it.
    """
    streams = [s for s in container.streams.video if not s.disposition & _NO_PICTURES]
    if not streams:
        raise MediaError(path, _without_video(container))
    readable = [s for s in streams if s.codec_context is not None]
    if not readable:
        raise MediaError(path, "there is no decoder for its video")
    stream = min(
        readable, key=lambda s: (not s.disposition & Disposition.default, -s.width * s.height, s.index)
    )
    stream.codec_context.options = _STRICT
    stream.thread_type = "AUTO" if has_presentation_times(container) else "SLICE"
    return stream, _stream_notes(container, stream, len(streams))


def again(stream: av.VideoStream) -> av.VideoCodecContext:
    """A second decoder for the packets of a stream, without frame threads."""
    first = stream.codec_context
    context = cast(av.VideoCodecContext, av.CodecContext.create(first.codec, "r"))
    context.extradata, context.codec_tag = first.extradata, first.codec_tag
    context.width, context.height = stream.width, stream.height
    if first.bits_per_coded_sample:
        context.bits_per_coded_sample = first.bits_per_coded_sample
    context.options = _STRICT
    context.thread_type = "SLICE"
    return context


def has_presentation_times(container: av.container.InputContainer) -> bool:
    """Whether the container says when to show a frame; AVI only says when to decode it.

    Without frame threads, the decoding time that a frame carries is then that of the packet at which it came
    out, which is in the order of display.
    """
    return container.format.name != "avi"


def _stream_notes(container, stream: av.VideoStream, num_streams: int) -> tuple[str, ...]:
    notes = []
    if num_streams > 1:
        marked = ", marked as default" if stream.disposition & Disposition.default else ""
        size = f"{stream.width}x{stream.height}"
        notes.append(f"stream {stream.index} of {num_streams} video streams is taken ({size}{marked})")
    if container.format.name in _WITHOUT_TIMES:
        notes.append(
            f"a raw stream has no times: {float(stream.average_rate or 25):g} frames per second assumed"
        )
    return tuple(notes)


def _without_video(container: av.container.InputContainer) -> str:
    if container.streams.audio:
        cover = " and a cover picture" if container.streams.video else ""
        return f"it holds sound{cover} but no video"
    return "it holds no video"


def last_indexed_byte(container: av.container.InputContainer, stream: av.VideoStream) -> int:
    """Return the end of the furthest frame that an MP4's index names; 0 for other containers.

    Others build their index while they are read, or from hints that need not be exact.
    """
    if "mp4" not in container.format.name:
        return 0
    return max((entry.pos + entry.size for entry in stream.index_entries), default=0)


def decoded(packet: av.Packet) -> list[av.VideoFrame]:
    """Decode a packet; frames that the decoder marks as damaged raise as undecodable packets do.

    Raises
    ------
    av.FFmpegError
        If the packet or one of its frames is damaged.
    """
    if packet.is_corrupt:
        raise av.error.InvalidDataError(0, "a packet is incomplete")
    frames = packet.decode()
    if any(frame.is_corrupt for frame in frames):
        raise av.error.InvalidDataError(0, "the decoder marks a frame as damaged")
    return frames
