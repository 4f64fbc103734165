# SPDX-License-Identifier: Apache-2.0
import heapq, sys, random
# one product: experts with m row tiles each; F feature tiles; C chunks a tile. Times in clocks.
def simulate(ms, F, C, slots, t_d, t_r, clusters=66, warps=528, group=0, seed=0, late=0, lead_claim=1):
    rnd=random.Random(seed)
    # numbers: list of lists of (w, weight reads)
    numbers=[]; readers=[]; w=0; wid=[]
    for m in ms:
        twos=m//2; odd=m%2
        base=w
        for f in range(0,F,2):
            width=min(2,F-f)
            for k in range(width):
                for t in range(twos): numbers.append([base+f+k])
            if odd: numbers.append([base+f+k for k in range(width)])
        for f in range(F): readers.append(twos+odd if True else 0)
        w+=F
    W=w
    # order of chunks
    G=group or 1
    if group:
        order=[]; pos={}
        for g in range(0,W,G):
            for c in range(C):
                for x in range(g,min(W,g+G)): pos[(x,c)]=len(order); order.append((x,c))
    else:
        order=[(x,c) for x in range(W) for c in range(C)]; pos={o:i for i,o in enumerate(order)}
    N=len(order)
    ready=[0]*N; read=[0]*N; ready_wait={}; slot_wait={}
    ev=[]; cnt=0
    def push(t,*a):
        nonlocal cnt; cnt+=1; heapq.heappush(ev,(t,cnt)+a)
    nxt=0
    def claim():
        nonlocal nxt; nxt+=1; return nxt-1
    held=[[claim() for _ in range(1+lead_claim)] for _ in range(warps)]
    stall_d=0
    def try_decode(t,wp):
        q=held[wp][0]; ch=q//4
        if ch>=N: return
        if ch>=slots and read[ch-slots]<readers[order[ch-slots][0]]:
            slot_wait.setdefault(ch-slots,[]).append((wp,t)); return
        push(t+t_d*(0.9+0.2*rnd.random()),'dec',wp,ch)
    nn=0
    state=[None]*clusters; wait_total=0
    def next_number(t,cl):
        nonlocal nn
        if nn>=len(numbers): state[cl]=None; return
        state[cl]=[numbers[nn],0]; nn+=1
        try_read(t,cl)
    def try_read(t,cl):
        ws,c=state[cl]
        for x in ws:
            i=pos[(x,c)]
            if ready[i]<4:
                ready_wait.setdefault(i,[]).append((cl,t)); return
        push(t+t_r*(0.98+0.04*rnd.random()),'rd',cl)
    for wp in range(warps): try_decode(rnd.random()*1000,wp)
    for cl in range(clusters): push(late*rnd.random(),'start',cl)
    T=0
    dec_wait=0; rd_wait=0
    while ev:
        e=heapq.heappop(ev); t=e[0]; T=t
        if e[2]=='start': next_number(t,e[3])
        elif e[2]=='dec':
            wp,ch=e[3],e[4]
            ready[ch]+=1
            if ready[ch]==4:
                for cl,t0 in ready_wait.pop(ch,[]): rd_wait+=t-t0; try_read(t,cl)
            held[wp].pop(0); held[wp].append(claim()); try_decode(t,wp)
        elif e[2]=='rd':
            cl=e[3]; ws,c=state[cl]
            for x in ws:
                push(t+t_r,'ann',pos[(x,c)])
            state[cl][1]+=1
            if state[cl][1]==C: push(t+500,'start',cl)
            else: try_read(t,cl)
        elif e[2]=='ann':
            i=e[3]; read[i]+=1
            if read[i]==readers[order[i][0]]:
                for wp,t0 in slot_wait.pop(i,[]): dec_wait+=t-t0; try_decode(t,wp)
    left=len(numbers)-nn+sum(s is not None for s in state)
    ideal=len(numbers)*C*t_r/clusters
    return T,ideal,rd_wait/clusters/T,dec_wait/warps/T,left
if __name__=='__main__':
    rnd=random.Random(3)
    rows=[max(1,int(rnd.gauss(512,90))) for _ in range(32)]
    ms=[-(-r//128) for r in rows]
    for name,F,C in (('up',23,12),('down',12,12)):
        for t_d in (25000,18000,12000):
            for slots in (256,512,1024,2048):
                for group in (0,16,33,66):
                    T,ideal,rw,dw,left=simulate(ms,F,C,slots,t_d,4200,group=group)
                    print(name,'t_d',t_d,'slots',slots,'group',group,'x ideal %.3f read waits %.2f decode waits %.2f left %d'%(T/ideal,rw,dw,left))
